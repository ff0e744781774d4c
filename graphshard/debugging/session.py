"""Watches what is compiled and run for a while, and writes a page about it: `debug`."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphshard.compat.dynamo_frames import frames_seen_by
from graphshard.debugging.dynamo_code import DynamoCode, check_depyf
from graphshard.debugging.page import page
from graphshard.debugging.seen import Seen
from graphshard.files import check_own, make_private, write_private
from graphshard.reporting.artifacts import observed_by, rank_folder

log = logging.getLogger(__name__)

_one_at_a_time = threading.Lock()
PAGE = "index.html"


@contextmanager
def debug(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Inside, what graphshard and Dynamo compile is kept; then ``folder/rankN/index.html`` shows it.

    The page needs nothing else, no network either: what Dynamo has made of functions, as Python (by depyf), each graph
    before and after each pass, plans with timeline and memory over time, generated code, and the report, of all models
    that ran. Of what was compiled before, it has the last graph, plan and code. Each rank writes its own, for its
    owner's eyes, and nothing is sent: one rank alone may ask. Where an error comes out, the page is written with it.

    With `measure` inside, timelines have measured times, too.

    Args:
        folder: of all ranks; it is made. A page of an earlier run is replaced.

    Yields:
        The path of this rank's page.

    Raises:
        ModuleNotFoundError: depyf is not installed.
        TypeError: `folder` is no path.
        NotADirectoryError: it, or one above it, is a file.
        PermissionError: the rank's folder is a link, or another user's.
        RuntimeError: another `debug` runs.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"graphshard.debug: folder: got {type(folder).__name__}, want the path of a folder")
    check_depyf()
    own = rank_folder(Path(folder))
    try:
        make_private(own)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"graphshard.debug: folder: got '{error.filename}', a file; want a folder") from None
    check_own(own)
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("graphshard.debug: got one inside another, want one at a time: leave the inner one out")
    seen, frames = Seen(), DynamoCode()
    said = ""
    try:
        with observed_by(seen), frames_seen_by(frames.saw):
            yield own / PAGE
    except BaseException as error:
        said = "".join(traceback.format_exception(error))
        raise
    finally:
        try:
            write_private(own / PAGE, page(seen.models(), seen.elsewhere(), frames.read(), said))
            log.info("graphshard: debug: %s", own / PAGE)
        except Exception as error:
            if not said:
                raise
            log.warning("graphshard: debug: '%s' could not be written: %s", own / PAGE, error)
        finally:
            _one_at_a_time.release()
