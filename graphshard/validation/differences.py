"""Where two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.graph.sameness import Bitwise, Sameness

Values = list[Any]
# Runs a graph and tells each node and its values.
Replay = Callable[[Callable[[Node, Values], None]], object]


@dataclass(frozen=True)
class Difference:
    """Of one result.

    Attributes:
        result: its number; None: of what an input was in the end.
        name: of the node that is returned, or of the input.
        rank: the first that has another.
        says: how it differs.
    """

    result: int | None
    name: str
    rank: int
    says: str

    def __str__(self) -> str:
        what = f"result {self.result}, %{self.name}" if self.result is not None else f"input %{self.name} in the end"
        return f"{what}, of rank {self.rank}: {self.says}"


def value_difference(got: Any, want: Any, sameness: Sameness, terms: int, dtype: torch.dtype) -> str:
    """How a value differs; ``""``: it does not."""
    if isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)) and len(got) == len(want):
        found = (value_difference(a, b, sameness, terms, dtype) for a, b in zip(got, want, strict=True))
        return next(filter(None, found), "")
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        alike = got is want or (type(got) is type(want) and not isinstance(got, Tensor) and bool(got == want))
        return "" if alike else f"got {got!r:.60}, want {want!r:.60}"
    if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
        return f"got {_shown(got)}, want {_shown(want)}"
    return "" if got is want else sameness.differ(got, want, terms, dtype)


def _shown(value: Tensor) -> str:
    return f"{str(value.dtype)[6:]} {tuple(value.shape)} on {value.device}"


def first_difference(
    got: Sequence[Values],
    want: Sequence[Values | None],
    names: Sequence[str],
    sameness: Sameness,
    dtype: torch.dtype,
    first_result: int | None = 0,
) -> Difference | None:
    """The first result that differs on some rank.

    Args:
        got: results, each of every rank.
        want: likewise; None: nothing is wanted of it.
        names: of the results.
        sameness: of the pass.
        dtype: the coarsest on the way.
        first_result: number of the first; None: they are inputs.
    """
    if len(got) != len(want):
        return Difference(min(len(got), len(want)), "output", 0, f"got {len(got)} results, want {len(want)}")
    for place, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        seen: set[tuple[int, int]] = set()
        for rank, (a, b) in enumerate(zip(ours, theirs or (), strict=theirs is not None)):
            if (id(a), id(b)) not in seen and (says := value_difference(a, b, sameness, len(ours), dtype)):
                return Difference(None if first_result is None else first_result + place, names[place], rank, says)
            seen.add((id(a), id(b)))
    return None


def first_differing_node(before: Replay, after: Replay, among: frozenset[str]) -> str:
    """Name of the first node of `after`, among some, that has another value than the node of that name had before."""
    known: dict[str, Values] = {}
    found: list[str] = []

    def remember(node: Node, values: Values) -> None:
        if all(isinstance(value, Tensor) for value in values):
            known[node.name] = [value.detach().clone() for value in values]

    def compare(node: Node, values: Values) -> None:
        if found or node.name not in among or node.name not in known or node.op == "placeholder":
            return
        if len(values) != len(known[node.name]) or not all(isinstance(value, Tensor) for value in values):
            return
        pairs = zip(values, known[node.name], strict=True)
        if any(value_difference(a.detach(), b, Bitwise(), 1, torch.float32) for a, b in pairs):
            found.append(node.name)

    before(remember)
    after(compare)
    return found[0] if found else ""


def ancestors(graph: Graph, name: str) -> frozenset[str]:
    """Names of what a node is computed of, and its own."""
    start = [node for node in graph.nodes if node.name == name]
    seen, stack = set(start), start
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return frozenset(node.name for node in seen)


def result_names(results: Sequence[Any], inputs: Mapping[str, object] | None = None) -> list[str]:
    """What results are called."""
    return [result.name if isinstance(result, Node) else str(result) for result in results]
