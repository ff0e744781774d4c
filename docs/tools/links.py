"""Links of the Markdown files: to files of the repository, and to headings in them. Nothing is asked of the network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from docs.tools.messages import ROOT


class Link(NamedTuple):
    """One link or picture.

    Attributes:
        page: that it stands in.
        line: of its paragraph, from 1.
        target: as it is written.
    """

    page: Path
    line: int
    target: str


def pages() -> list[Path]:
    """The Markdown files of the repository."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[Link]:
    """The links of a page, in order."""
    for block in _tokens(page):
        for token in block.children or ():
            target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
            if target is not None:
                yield Link(page, (block.map or (0, 0))[0] + 1, str(target))


@cache
def anchors(page: Path) -> frozenset[str]:
    """What headings of a page are linked by, as code forges and Sphinx make it."""
    if included := re.match(r"```\{include\} (\S+)\n", page.read_text(encoding="utf-8")):
        return anchors((page.parent / included[1]).resolve())
    found: set[str] = set()
    tokens = _tokens(page)
    for heading, inline in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(token.content for token in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            count = 1
            name = slug
            while name in found:
                name, count = f"{slug}-{count}", count + 1
            found.add(name)
    return frozenset(found)


def dead(link: Link) -> str:
    """What is wrong with a link; `""`: nothing, or it leads out of the repository."""
    file, _, anchor = link.target.partition("#")
    if re.match(r"[a-z]+:", link.target):
        return ""
    path = (link.page.parent / unquote(file)).resolve() if file else link.page
    where = f"{link.page.relative_to(ROOT).as_posix()}:{link.line}: {link.target}"
    if not path.exists() or ROOT not in path.parents:
        return f"{where}: no such file"
    if anchor and (path.suffix != ".md" or anchor not in anchors(path)):
        return f"{where}: no such heading"
    return ""
