"""Files and folders that only their owner reads and writes."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it, if it is not there.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def check_own(folder: Path) -> None:
    """Of a folder whose name anyone can guess, in a folder where anyone may make one.

    Raises:
        OSError: it is a link, or another user's.
    """
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise PermissionError(f"'{folder}' is a link or another user's; want a folder of your own")


def write_private(path: Path, text: str) -> None:
    """Writes a file whole or not at all, which nobody else can read.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as opened:
            opened.write(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
