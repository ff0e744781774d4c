"use strict";
// Folded lines of graphs are written when they are unfolded: a page has each line once, and each graph as runs of lines.
const found = JSON.parse(document.getElementById("lines").textContent);

function linesOf(graph, first, last) {
  const taken = [], runs = found.graphs[graph];
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) {
    const from = Math.max(first - at, 0), to = Math.min(last - at, runs[i + 1]);
    for (let k = from; k < to; k++) taken.push(found.lines[runs[i] + k]);
    at += runs[i + 1];
  }
  return taken;
}

document.addEventListener("toggle", (event) => {
  const folded = event.target;
  if (!folded.classList.contains("folded") || !folded.open || folded.childElementCount > 1) return;
  const { graph, first, last } = folded.dataset;
  const lines = linesOf(Number(graph), Number(first), Number(last)).map((text) => {
    const line = document.createElement("div");
    line.textContent = "  " + text;
    return line;
  });
  folded.append(...lines);
}, true);
