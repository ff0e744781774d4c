"""``graphshard doctor MODULE:FUNCTION``: looks at a model in this process, without a process group."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graphshard.examining.doctor import doctor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="a function without arguments that returns the module")
    parser.add_argument("--world", type=int, metavar="N", help="ranks that parameters are sharded over")
    parser.add_argument(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns sample arguments of forward: a tensor, a tuple, a dict of "
        "keyword arguments, or a tuple and such a dict",
    )
    parser.add_argument("--units", metavar="FQN,...", help="units, in place of the blocks found")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status: 0, 1 if something is refused, 2 for what cannot be looked at."""
    try:
        model = _called(options.model)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{options.model} returned a {type(model).__name__}, want an nn.Module")
        args, kwargs = (None, None) if options.inputs is None else _arguments(_called(options.inputs))
        units = None if options.units is None else options.units.split(",")
        diagnosis = doctor(model, options.world, args, kwargs, units=units)
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"graphshard doctor: {error}\n")
        return 2
    sys.stdout.write(f"{diagnosis.to_json() if options.json else diagnosis}\n")
    return int(bool(diagnosis.refused))


def _called(path: str) -> Any:
    """What the function at ``module:function`` returns. Modules of the working directory can be imported.

    Raises:
        ValueError: there is no such module or function, or it failed.
    """
    module, colon, function = path.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        if not colon:
            raise ImportError("no colon in it")
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"got {path!r}: {error}; want module:function, of a module that can be imported") from error
    if not callable(found):
        raise ValueError(f"got {path!r}, a {type(found).__name__}, want a function without arguments")
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} raised {type(error).__name__}: {error}") from error


def _arguments(values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sample arguments as (args, kwargs)."""
    if isinstance(values, Mapping):
        return (), dict(values)
    if isinstance(values, Tensor):
        return (values,), {}
    if not isinstance(values, tuple):
        raise ValueError(f"inputs: got {type(values).__name__}, want a tensor, a tuple, a dict, or a tuple and a dict")
    if len(values) == 2 and isinstance(values[0], tuple) and isinstance(values[1], Mapping):
        return values[0], dict(values[1])
    return values, {}
