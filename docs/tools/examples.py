"""The examples of the docs: blocks of Python in README.md and docs/*.md, in order, as they stand there.

A block that is not run has the reason in front of it:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.tools.messages import ROOT

_BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.*?) -->\n+)?```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """One block.

    Attributes:
        line: of its first line of code, from 1.
        code: in it.
        why_not: why it is not run; None: it is.
    """

    line: int
    code: str
    why_not: str | None


def pages() -> Iterator[Path]:
    """What may have examples."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def examples(page: Path) -> list[Example]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Example(text.count("\n", 0, match.start("code")) + 1, match["code"], match["why"])
        for match in _BLOCK.finditer(text)
    ]
