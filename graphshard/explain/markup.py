"""Names in HTML and SVG: anyone may have chosen them."""

from __future__ import annotations

import html
import re

# What XML has no character for, and what a reader takes for the end of a line where none is.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """The text as content or quoted attribute; a character that cannot be there, or turns what follows around, is
    shown as one that is unknown.
    """
    return html.escape(_UNWRITABLE.sub("\ufffd", text))
