"""Compiled bodies of stretches, each made once for all that are equal: in one program, and in all of a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphshard import env
from graphshard.compat.body_strides import StridesUnknown, differ
from graphshard.compat.cache import is_first_to_ask
from graphshard.compat.inductor import compile_body, compile_graph_inductor, generated_code
from graphshard.graph.stretches import Stretch, cut, undivided
from graphshard.lowering.flat_program import Body, FlatProgram, Run
from graphshard.reporting.progress import progress

Key: TypeAlias = tuple[object, ...]
# A body shares most kernels with one that has this part of its operators.
_ALIKE = 0.8
_WHOLE = "a program is compiled as a whole, equal blocks one by one"


class Bodies:
    """Those of one model."""

    def __init__(self) -> None:
        self._bodies: dict[Key, Body] = {}

    def compile_program(
        self, gm: GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any], say: Callable[[str], None]
    ) -> Run:
        """Code of a lowered program, by Inductor.

        Args:
            gm: the program.
            inputs: example values of its arguments.
            kwargs: of Inductor, for the whole.
            say: is told, once, why a program is compiled as a whole.
        """
        if env.is_disabled("outline_blocks"):
            return compile_graph_inductor(gm, inputs, kwargs)
        if why := undivided(gm.graph) or _in_other_strides(gm, inputs):
            say(f"{_WHOLE}: {why}")
            return compile_graph_inductor(gm, inputs, kwargs)
        steps = cut(gm.graph)
        keys = {step: self._key(step, kwargs) for step in steps if isinstance(step, Stretch)}
        missing = {key: step for step, key in keys.items() if key not in self._bodies}
        for done, key in enumerate(_in_turn(missing)):
            progress.count(done, len(missing))
            stretch = missing[key]
            values = [node.meta["val"] for node in stretch.inputs]
            try:
                run = compile_body(stretch.module(gm), values, kwargs)
            except StridesUnknown:
                say(f"{_WHOLE}: Inductor changes strides that depend on dynamic sizes")
                return compile_graph_inductor(gm, inputs, kwargs)
            self._bodies[key] = Body(run, generated_code(run))
        return FlatProgram(gm, steps, {step: self._bodies[key] for step, key in keys.items()})

    def _key(self, stretch: Stretch, kwargs: dict[str, Any]) -> Key:
        # Symbols have their meaning in one capture only.
        return *stretch.key(), stretch.shapes, kwargs.get("is_backward")


def _in_other_strides(gm: GraphModule, inputs: Sequence[Any]) -> str:
    """Which argument of a program has other strides than in its graph, as of a forward that was compiled as a whole."""
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False):
        if isinstance(value := node.meta.get("val"), Tensor) and differ(value, given.stride()):
            return f"Inductor has changed the strides of {node.name}"
    return ""


def _in_turn(missing: Mapping[Key, Stretch]) -> Iterator[Key]:
    """First what no other rank of this host has begun; then what they have, which by then is in Inductor's cache, or is
    compiled here too: nothing waits for a rank that is gone.
    """
    rank, ranks = env.place_on_host()
    theirs = []
    for key in missing if ranks == 1 else _first_to_last(missing):
        if ranks == 1 or is_first_to_ask(_digest(key)):
            yield key
        else:
            theirs.append(key)
    first = len(theirs) * rank // ranks
    yield from (*theirs[first:], *theirs[:first])


def _first_to_last(missing: Mapping[Key, Stretch]) -> list[Key]:
    """Large ones first, and last what is nearly equal to a larger one: ranks that compile both at once would wait for
    each other's kernels.
    """
    first, last, seen = list[Key](), list[Key](), list[Counter[str]]()
    for key in sorted(missing, key=lambda key: len(missing[key].nodes), reverse=True):
        targets = Counter(str(node.target) for node in missing[key].nodes)
        least = _ALIKE * targets.total()
        (last if any((targets & other).total() >= least for other in seen) else first).append(key)
        seen.append(targets)
    return [*first, *last]


def _digest(key: Key) -> str:
    """The same on all ranks; keys that differ only in their constants have one, too."""
    text, *_, is_backward = key
    return hashlib.sha256(f"{torch.__version__} {is_backward} {text}".encode()).hexdigest()
