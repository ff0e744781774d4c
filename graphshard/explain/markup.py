"""Names in HTML and SVG: anyone may have chosen them; pages inside of others."""

from __future__ import annotations

import html
import re

# What XML has no character for, and what a reader takes for the end of a line where none is.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """The text as content or quoted attribute; see `writable`."""
    return html.escape(writable(text))


def writable(text: str) -> str:
    """The text, but for characters that cannot be in a page, or turn what follows around: each is shown as one that is
    unknown.
    """
    return _UNWRITABLE.sub("\ufffd", text)


def framed(page: str, title: str, height_px: int = 720) -> str:
    """A page inside another one: its script runs, in an origin of its own, and reaches nothing around it.

    Args:
        page: the whole document.
        title: of the frame, for those who do not see it.
        height_px: which the reader may change.
    """
    return (
        f'<iframe sandbox="allow-scripts" title="{escape(title)}" srcdoc="{escape(page)}" '
        f'style="width: 100%; height: {height_px}px; border: 0; resize: vertical; overflow: auto"></iframe>'
    )
