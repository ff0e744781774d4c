"""A module-level function, named so that another process can import it however this one imported its module."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class FunctionName:
    """Where a function lives: pytest's import modes give a module a name that only the file behind it makes importable.

    Attributes:
        module: the module's name, which pickled classes of that module refer to.
        file: its source file.
        qualname: the function's dotted name inside the module.
    """

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionName:
        """Names `function`.

        Raises:
            TypeError: if it is not a module-level function that another process could import.
        """
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        qualname = getattr(function, "__qualname__", "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or not qualname or "<" in qualname:
            raise TypeError(f"got {function!r}, want a module-level function: the ranks import it by its name")
        return cls(module.__name__, str(Path(file).resolve()), qualname)

    def load(self) -> Callable[..., Any]:
        """Imports the module, once in each process, and returns the function.

        Raises:
            ImportError: if the file cannot be imported.
            AttributeError: if the module holds no such name.
        """
        value: Any = _module(self.module, self.file)
        for part in self.qualname.split("."):
            value = getattr(value, part)
        function: Callable[..., Any] = value
        return function


@functools.cache
def _module(name: str, file: str) -> ModuleType:
    if (loaded := sys.modules.get(name)) is not None and _is_from(getattr(loaded, "__file__", None), file):
        return loaded
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is no package, a module without a spec
        found = None
    if found is not None and _is_from(found.origin, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file} as {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickled classes of the module are looked up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_from(found: str | None, file: str) -> bool:
    return found is not None and str(Path(found).resolve()) == file
