"""Why a pass is not checked."""

from __future__ import annotations


class Unchecked(Exception):
    """A graph cannot be run in a world of this process; the message says why, as the end of a sentence."""
