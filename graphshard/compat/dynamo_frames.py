"""The code that Dynamo puts in the place of a function's: seen when it is made, with its guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType

from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import CompileContext

# Is told a function's code, what Dynamo has made of it, and the number of the compilation: "0/1".
Seen = Callable[[CodeType, CodeType, str], None]


@contextmanager
def frames_seen_by(seen: Seen) -> Iterator[None]:
    """Inside, `seen` is told of each function that Dynamo compiles in this process."""

    def hook(code: CodeType, new_code: CodeType) -> CodeType | None:
        seen(code, new_code, str(CompileContext.current_compile_id() or ""))
        return None  # what was made is run

    handle = register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def guards_of(code: CodeType, made: CodeType) -> str:
    """What must be as it was for `made` to run in the place of `code`, a line for each guard; empty where Dynamo has
    dropped it.
    """
    for entry in _debug_get_cache_entry_list(code):
        if entry.code is made:
            return str(entry.guard_manager)
    return ""
