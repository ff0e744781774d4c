"""What Dynamo has made of functions, as Python again: depyf reads its bytecode.

Of depyf only its decompiler is used. `depyf.prepare_debug` would replace functions of torch, and run what it has
decompiled in the place of what Dynamo has made.
"""

from __future__ import annotations

import dis
import inspect
import io
import warnings
from dataclasses import dataclass
from types import CodeType
from typing import Any

from graphshard.compat.dynamo_frames import guards_of

# Of a model with many layers there may be thousands.
SHOWN_GUARDS = 1000


@dataclass(frozen=True)
class Frame:
    """One function, compiled once.

    Attributes:
        name: of the function.
        place: its file and line.
        number: of the compilation, as in traces: ``"0/1"``.
        original: its source, or ``""`` where that is not to be had.
        made: what Dynamo has made of it, as Python.
        problem: why that is a listing of bytecode instead; ``""``: it is not.
        guards: what must be as it was for it to run, a line for each.
    """

    name: str
    place: str
    number: str
    original: str
    made: str
    problem: str
    guards: str


class DynamoCode:
    """Functions that were compiled, in order."""

    def __init__(self) -> None:
        self._seen: list[tuple[CodeType, CodeType, str]] = []

    def saw(self, code: CodeType, made: CodeType, number: str) -> None:
        """Is told of one."""
        self._seen.append((code, made, number))

    def read(self) -> list[Frame]:
        """Reads all of them."""
        return [_frame(*seen) for seen in self._seen]


def check_depyf() -> None:
    """Raises:
    ModuleNotFoundError: depyf is not installed.
    """
    try:
        _depyf()
    except ImportError as error:
        raise ModuleNotFoundError(
            f"graphshard.debug: got no depyf, which reads the code that Dynamo makes ({error}); "
            "install it: pip install graphshard[debug]"
        ) from None


def _frame(code: CodeType, made: CodeType, number: str) -> Frame:
    text, problem = _decompiled(made)
    lines = guards_of(code, made).splitlines()
    if len(lines) > SHOWN_GUARDS:
        lines = [*lines[:SHOWN_GUARDS], f"... {len(lines) - SHOWN_GUARDS} more"]
    try:
        original = inspect.getsource(code)
    except (OSError, TypeError, IndexError):
        original = ""
    return Frame(
        code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}", number, original, text, problem, "\n".join(lines)
    )


def _decompiled(code: CodeType) -> tuple[str, str]:
    try:
        return str(_depyf().decompile(code)), ""
    except Exception as error:  # depyf knows the bytecode of some functions and versions of Python, and not of others
        listing = io.StringIO()
        dis.dis(code, file=listing)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return listing.getvalue(), f"depyf cannot read it, so this is bytecode: {reason}"


def _depyf() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves a file to be closed
        import depyf
    return depyf
