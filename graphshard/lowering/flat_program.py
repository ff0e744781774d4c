"""Python source of a program that calls compiled bodies: each value is dropped before the last call that reads it.

What runs by itself is a line; a stretch is the call of its body, which frees what only it still reads:

    wait = torch.ops._c10d_functional.wait_tensor.default(gather)
    _read = [hidden, weight]
    del weight
    relu, addmm, = body_0(_read)
"""

from __future__ import annotations

import itertools
import linecache
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.tensors import is_torch_operator
from graphshard.graph.ir import output_args
from graphshard.graph.stretches import Stretch
from graphshard.graph.unit_ranges import units_of
from graphshard.reporting.named_events import computing, names_events

# Takes a list of arguments, which it empties, and returns its results.
Run = Callable[[list[Any]], Sequence[Any]]

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Body:
    """Code for all stretches that are equal, and its source, if there is one."""

    run: Run
    source: str | None


class FlatProgram:
    """A program as source.

    Args:
        gm: the program.
        steps: of `graph.stretches.cut`.
        bodies: of its stretches.

    Attributes:
        source_code: of the program, and of the bodies behind it, once each.
    """

    def __init__(self, gm: GraphModule, steps: Sequence[Node | Stretch], bodies: dict[Stretch, Body]) -> None:
        numbers = {body: number for number, body in enumerate(dict.fromkeys(bodies.values()))}
        self._globals: dict[str, Any] = {"torch": torch}
        self._globals |= {f"body_{number}": body.run for body, number in numbers.items()}
        names = {stretch: f"body_{numbers[body]}" for stretch, body in bodies.items()}
        self._calls: list[tuple[int, str, Callable[..., Any], str]] = []  # (line, callee, what it is, its units)
        lines = [*self._lines(gm, steps, names), ""]
        sources = [f"# body_{number}\n{body.source}" for body, number in numbers.items() if body.source is not None]
        self.source_code = "\n".join([*lines, *sources])
        # Named like a file, so that tracebacks and the watchdog find the lines.
        file = f"<graphshard program {next(_numbers)}>"
        weakref.finalize(self, linecache.cache.pop, file, None)
        linecache.cache[file] = (len(lines), None, [f"{line}\n" for line in lines], file)
        self._lines_of, self._file = lines, file
        self._program = self._compiled(lines)
        self._named: Run | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if names_events():
            if self._named is None:
                self._named = self._compiled(self._with_names())
            return self._named(args)
        return self._program(args)

    def _compiled(self, lines: Sequence[str]) -> Run:
        exec(compile("\n".join(lines), self._file, "exec"), self._globals)
        program: Run = self._globals.pop("program")
        return program

    def _with_names(self) -> list[str]:
        """The same lines, in which what is computed of units has names in a profiler's trace."""
        lines = list(self._lines_of)
        for number, (line, callee, function, units) in enumerate(self._calls):
            self._globals[f"named_{number}"] = partial(_in_range, units, function)
            lines[line] = lines[line].replace(f"{callee}(", f"named_{number}(", 1)
        return lines

    def _lines(self, gm: GraphModule, steps: Sequence[Node | Stretch], bodies: dict[Stretch, str]) -> list[str]:
        last = _last_reads(gm.graph, steps)
        arguments = gm.graph.find_nodes(op="placeholder")
        lines = ["def program(_args):"]
        if arguments:
            lines += [f"    {', '.join(node.name for node in arguments)}, = _args", "    _args.clear()"]
        unread = ", ".join(node.name for node in arguments if node not in last)
        lines += [f"    del {unread}"] * bool(unread)
        for place, step in enumerate(steps):
            read = step.inputs if isinstance(step, Stretch) else step.all_input_nodes
            done = ", ".join(node.name for node in read if last[node] == place)
            if isinstance(step, Stretch):
                lines.append(f"    _read = [{', '.join(node.name for node in step.inputs)}]")
                lines += [f"    del {done}"] * bool(done)
                self._calls.append((len(lines), bodies[step], self._globals[bodies[step]], units_of(step.nodes)))
                results = "".join(f"{node.name}, " for node in step.outputs)
                lines.append(f"    {results and results + '= '}{bodies[step]}(_read)")
            else:
                if (units := units_of([step])) and is_torch_operator(step.target):
                    self._calls.append((len(lines), f"torch.ops.{step.target}", step.target, units))
                unused = "" if step in last else "; del " + step.name
                lines.append(f"    {step.name} = {self._call(step)}{unused}")
                lines += [f"    del {done}"] * bool(done)
        results = ", ".join(self._text(value) for value in output_args(gm.graph))
        return [*lines, f"    return [{results}]"]

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        name = f"torch.ops.{node.target}" if is_torch_operator(node.target) else self._constant(node.target)
        given = [self._text(value) for value in node.args]
        given += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return f"{name}({', '.join(given)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self._globals)}"
        self._globals[name] = value
        return name


def _in_range(units: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with computing(units):
        return function(*args, **kwargs)


def _last_reads(graph: Graph, steps: Sequence[Node | Stretch]) -> dict[Node, int]:
    """The last step that reads a value; results of the program are read behind all."""
    last: dict[Node, int] = {}
    for place, step in enumerate(steps):
        last |= dict.fromkeys(step.inputs if isinstance(step, Stretch) else step.all_input_nodes, place)
    return last | {node: len(steps) for node in output_args(graph) if isinstance(node, Node)}
