"use strict";
// Zoom: a timeline's bars have microseconds as x in an inner svg, whose viewBox is the time in view. Labels and axis are
// written anew for each view. Without this script the page shows everything, whole.
const LEFT = 132, RIGHT = 1192, AXIS = 24, LETTER = 6.3;
const tip = document.getElementById("tip");

function element(svg, name, attributes, text) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

function tickName(us, step) {
  if (!us) return "0";
  const [unit, name] = step >= 1e5 ? [1e6, "s"] : step >= 1e2 ? [1e3, "ms"] : [1, "us"];
  return (us / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9))) + " " + name;
}

function setUp(section) {
  const svg = section.querySelector(".timeline"), inner = svg.querySelector(".bars");
  const axis = svg.querySelector(".axis"), labels = svg.querySelector(".labels");
  const height = svg.viewBox.baseVal.height, whole = Number(svg.dataset.end);
  let from = 0, to = whole, chosen = null;

  const bars = [...inner.querySelectorAll("rect, path")].map((shape) => {
    const title = shape.querySelector("title"), text = title.textContent;
    title.remove(); // the tooltip of this page shows it instead
    const at = (name) => Number(shape.getAttribute(name));
    const bar = { shape, text, name: text.split("\n")[0], kind: shape.classList[0], bucket: shape.dataset.b };
    if (shape.tagName === "rect") {
      bar.start = at("x"); bar.end = bar.start + at("width"); bar.y = at("y") + at("height") / 2 + 4;
    }
    bar.labelled = shape.tagName === "rect" && !shape.classList.contains("measured");
    shape.bar = bar;
    return bar;
  });

  function draw() {
    inner.setAttribute("viewBox", `${from} 0 ${to - from} ${height}`);
    svg.classList.toggle("zoomed", to - from < whole);
    const scale = (RIGHT - LEFT) / (to - from);
    axis.replaceChildren();
    labels.replaceChildren();
    const power = 10 ** Math.floor(Math.log10((to - from) / 8));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= (to - from) / 8.01);
    for (let number = Math.ceil(from / step - 1e-9); number * step <= to; number++) {
      const x = LEFT + (number * step - from) * scale;
      axis.append(element(svg, "line", { x1: x, x2: x, y1: AXIS - 4, y2: height }));
      axis.append(element(svg, "text", { x, y: AXIS - 9 }, tickName(number * step, step)));
    }
    for (const bar of bars) {
      if (!bar.labelled || bar.end <= from || bar.start >= to) continue;
      const left = Math.max(bar.start, from), right = Math.min(bar.end, to);
      const letters = Math.floor(((right - left) * scale - 8) / LETTER);
      if (letters < 4) continue;
      const name = bar.name.length <= letters ? bar.name : bar.name.slice(0, letters - 1) + "…";
      labels.append(element(svg, "text", { class: "on-" + bar.kind, x: LEFT + (left - from) * scale + 4, y: bar.y }, name));
    }
  }

  function view(start, end) {
    const span = Math.min(whole, Math.max(end - start, whole / 1e5));
    from = Math.min(Math.max(0, start), whole - span);
    to = from + span;
    draw();
  }

  function zoom(factor, around) {
    const middle = around === undefined ? (from + to) / 2 : around;
    view(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  function timeAt(event) {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    return from + ((x - LEFT) / (RIGHT - LEFT)) * (to - from);
  }

  function light(bucket) {
    svg.classList.toggle("chosen", bucket !== null);
    for (const bar of bars) bar.shape.classList.toggle("lit", bucket !== null && bar.bucket === bucket);
    for (const row of section.querySelectorAll("tr[data-b]")) row.classList.toggle("lit", row.dataset.b === bucket);
  }

  let held = null, moved = false;
  inner.addEventListener("pointermove", (event) => {
    if (held !== null) return;
    const bar = event.target.bar;
    tip.style.display = bar ? "block" : "none";
    if (!bar) return;
    tip.textContent = bar.text;
    const x = event.clientX + 14, y = event.clientY + 16;
    tip.style.left = Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : y) + "px";
  });
  inner.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  inner.addEventListener("click", (event) => {
    if (moved) return;
    const bucket = event.target.bar && event.target.bar.bucket;
    chosen = bucket === undefined || bucket === chosen ? null : bucket;
    light(chosen);
  });
  svg.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from, to }; moved = false; });
  addEventListener("pointermove", (event) => {
    if (held === null) return;
    const width = svg.getBoundingClientRect().width * (RIGHT - LEFT) / svg.viewBox.baseVal.width;
    const shift = ((event.clientX - held.x) / width) * (held.to - held.from);
    if (Math.abs(event.clientX - held.x) > 3) moved = true;
    if (moved) { tip.style.display = "none"; view(held.from - shift, held.to - shift); }
  });
  addEventListener("pointerup", () => { held = null; });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
  }, { passive: false });
  svg.addEventListener("dblclick", () => view(0, whole));
  section.querySelector(".in").addEventListener("click", () => zoom(0.5));
  section.querySelector(".out").addEventListener("click", () => zoom(2));
  section.querySelector(".all").addEventListener("click", () => view(0, whole));

  for (const row of section.querySelectorAll("tr[data-b]")) {
    row.addEventListener("click", () => {
      chosen = row.dataset.b === chosen ? null : row.dataset.b;
      light(chosen);
      const own = bars.filter((bar) => bar.bucket === chosen && bar.labelled);
      if (!own.length) return view(0, whole);
      const start = Math.min(...own.map((bar) => bar.start)), end = Math.max(...own.map((bar) => bar.end));
      view(start - (end - start) * 0.6, end + (end - start) * 0.6);
      svg.scrollIntoView({ behavior: "smooth", block: "nearest" });
    });
  }
  draw();
}

// "1.5 ms", "64.0 MiB", "1.04x" as numbers, in us and bytes; a dash is less than all.
const UNITS = { us: 1, ms: 1e3, s: 1e6, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
function quantity(text) {
  const [value, unit] = text.split(" ");
  return text === "-" ? -1 : parseFloat(value) * (UNITS[unit] || 1);
}

function sortable(table) {
  const body = table.tBodies[0];
  table.querySelectorAll("th[data-sort]").forEach((head, column) => {
    const text = (row) => row.cells[column].textContent;
    const compare = head.classList.contains("number")
      ? (a, b) => quantity(text(a)) - quantity(text(b))
      : (a, b) => text(a).localeCompare(text(b), "en", { numeric: true });
    let sign = head.classList.contains("number") ? -1 : 1; // numbers: the greatest first
    head.addEventListener("click", () => {
      const rows = [...body.rows].sort((a, b) => sign * compare(a, b));
      sign = -sign;
      body.append(...rows);
    });
  });
}

document.querySelectorAll("section.program").forEach(setUp);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".filter").forEach((input) => {
  const rows = input.closest("details").querySelectorAll("tbody tr");
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    rows.forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(wanted); });
  });
});
