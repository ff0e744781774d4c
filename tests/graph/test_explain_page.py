"""A planned program as a page and as a picture: whole, alone, and safe."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from graphshard.explain.quantities import format_us
from tests.graph.planned_programs import deep_program, explanation, gather, planned, problem, small_program

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input", "link", "br", "hr", "img"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Reads a page, and that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


@pytest.mark.parametrize("layers", [1, 4, 500])
def test_page_is_whole_and_names_every_bucket(layers: int) -> None:
    program = deep_program(layers)
    page = Page(explanation(program).to_html())
    assert [tag for tag, _ in page.seen].count("section") == 1
    cells = set(page.text)
    assert set(program.bucket_names) <= cells
    drawn = {attrs.get("data-b") for tag, attrs in page.seen if tag == "rect"}
    assert drawn >= {str(row.index) for row in program.buckets}


def test_page_needs_nothing_from_elsewhere() -> None:
    text = explanation(small_program(), deep_program(3)).to_html()
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.seen}
    assert not [attrs for _, attrs in page.seen if "src" in attrs]


def test_page_explains_every_wait_and_the_text_only_the_longest() -> None:
    program = deep_program(12)
    waits = sum(1 for exposure in program.simulation.exposures if exposure.exposed_us)
    assert waits > 5
    shown = explanation(program)
    causes = r"(nothing before it|nothing behind it|queued|launched late|awaited early)"
    assert len(re.findall(f"<td>{causes}</td>", shown.to_html())) == waits
    assert len(re.findall(rf"  {causes}  ", shown.to_text(5))) == 5


def test_page_and_picture_escape_names() -> None:
    evil = '<script>alert("1")</script>&'
    program = planned(problem((50.0,), (gather(evil, 0),)), title=evil, plan=evil, bucket_names=(evil,))
    shown = replace(explanation(program, notes=(evil,)), hardware=evil)
    assert [tag for tag, _ in Page(shown.to_html()).seen].count("script") == 1
    assert evil in "".join(Page(shown.to_html()).text)
    assert not list(ElementTree.fromstring(shown.to_svg()).iter(f"{SVG}script"))


def test_picture_draws_each_event_where_it_happens() -> None:
    program = deep_program(4)
    root = ElementTree.fromstring(explanation(program).to_svg())
    inner = next(svg for svg in root.iter(f"{SVG}svg") if svg.get("class") == "bars")
    drawn = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in inner.iter(f"{SVG}rect")]
    happened = [(event.start_us, event.end_us - event.start_us) for event in program.simulation.events]
    assert len(drawn) == len(happened)
    for bar, event in zip(sorted(drawn), sorted(happened), strict=True):
        assert bar == pytest.approx(event, abs=0.011)
    assert float(inner.get("viewBox", "").split()[2]) == pytest.approx(program.simulation.step_us, abs=1e-3)


def test_picture_of_a_program_without_time_is_drawn() -> None:
    empty = planned(problem((0.0,)))
    ElementTree.fromstring(explanation(empty).to_svg())
    Page(explanation(empty).to_html())
    assert "it has no collectives" in explanation(empty).to_text()


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    shown = explanation()
    forms = {"html": shown.to_html, "json": shown.to_chrome_trace, "svg": shown.to_svg, "txt": shown.to_text}
    for suffix, form in forms.items():
        path = tmp_path / f"plan.{suffix}"
        shown.save(path)
        assert path.read_text(encoding="utf-8") == form()


def test_save_refuses_other_suffixes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save: path: got suffix '.pdf' in .*, want one of .html, .json, .svg, .txt"):
        explanation().save(tmp_path / "plan.pdf")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="save: path: got NoneType, want the path of a file"):
        explanation().save(None)  # type: ignore[arg-type]


ACTS = """<script>
const section = document.querySelector("section.program"), said = [];
const bars = section.querySelector(".bars"), whole = bars.getAttribute("viewBox");
const view = () => bars.getAttribute("viewBox").split(" ").map(Number);
said.push("labels " + (section.querySelectorAll(".labels text").length > 0));
section.querySelector(".in").click();
said.push("half " + (view()[2] * 2).toFixed(1));
section.querySelector(".all").click();
said.push("whole " + (view()[2] - Number(whole.split(" ")[2])));
section.querySelector("details tr[data-b='3']").click();
said.push("lit " + [...new Set([...bars.querySelectorAll(".lit")].map((bar) => bar.dataset.b))]);
said.push("in view " + (view()[2] < Number(whole.split(" ")[2])));
const exposed = section.querySelector("details th:last-child");
exposed.click();
const cells = [...section.querySelectorAll("details tbody tr")].map((row) => row.lastChild.textContent);
said.push("greatest " + cells[0] + ", least " + cells[cells.length - 1]);
const filter = section.querySelector(".filter");
filter.value = "NAME";
filter.dispatchEvent(new Event("input"));
said.push("left " + section.querySelectorAll("details tbody tr:not([hidden])").length);
document.title = said.join("; ");
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    program = deep_program(6)
    path = tmp_path / "plan.html"
    acts = ACTS.replace("NAME", program.bucket_names[2].upper())
    path.write_text(explanation(program).to_html().replace("</body>", acts), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    dumped = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    title = re.search("<title>(.*?)</title>", dumped)
    assert title is not None
    longest = max(row.exposed_us for row in program.buckets)
    assert title[1].split("; ") == [
        "labels true",
        f"half {program.simulation.step_us:.1f}",
        "whole 0",
        "lit 3",
        "in view true",
        f"greatest {format_us(longest)}, least -",
        "left 1",
    ]


def test_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    evil = '"><script>alert(1)</script>'
    shown = replace(explanation(small_program()), hardware=evil, notes=(evil,))
    read = Page(shown._repr_html_())
    ((tag, attributes),) = read.seen  # nothing of the page is outside
    assert tag == "iframe" and attributes["srcdoc"] == shown.to_html()
    assert attributes["sandbox"] == "allow-scripts"  # neither the notebook's origin nor its windows
    assert attributes["title"] and "src" not in attributes
