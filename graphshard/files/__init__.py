"""Files that anyone may have written: read as data, within limits; and files that are nobody else's to read."""

from graphshard.files.private import check_own, make_private, write_private
from graphshard.files.reading import parse_json, read_limited

__all__ = ["check_own", "make_private", "parse_json", "read_limited", "write_private"]
