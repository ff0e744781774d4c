"""Operators that tell blocks apart while Dynamo traces a model: an *exemplar*, whose code it traces, its *witness*,
which is traced, too, so that both traces can be compared, and its *twins*, which get one node in place of a trace.

Before a block is traced, its call asks (`ASK`) whether an exemplar was traced that stands for it. What the operators
say is in the sizes of their fake values, which are constants in a trace. Nothing runs them: `lowering.twins` puts the
exemplar's nodes in the place of each twin, and takes the rest away.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphshard.compat.running_trace import Changes, ambient_modes, graph_inputs, surrounding_graph
from graphshard.compat.tensors import (
    Sizes,
    empty_of,
    fake_mode_of,
    is_known,
    is_plain_fake,
    size_key,
    sizes_of,
    version,
)

_LIBRARY: Any = torch.library.Library("graphshard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("ask_twin(Tensor[] inputs, SymInt[] numbers, str block, str said) -> Tensor")
_LIBRARY.define("end_exemplar(Tensor[] outputs, int number, int[] results) -> Tensor")
_LIBRARY.define("twin(Tensor[] inputs, SymInt[] numbers, str block, int number) -> Tensor[]")

# Answers an empty tensor of size [0, number, of]: trace the block, as that exemplar (0: as none), and as the witness of
# another one (0: of none); or of size [1, number, *results]: it is a twin of that exemplar.
ASK = torch.ops.graphshard.ask_twin.default
# In what a call says: an argument that text cannot tell from others, or that the block could change.
OTHER = "?"
# Says what an exemplar returned: a tensor, or a tuple of `results`, each None (0) or one of the outputs, from 1 on. In
# an answer the outputs are those that it has made, and behind them come its inputs.
END = torch.ops.graphshard.end_exemplar.default
TWIN = torch.ops.graphshard.twin.default


def group_of(mark: str) -> str:
    """What is in front of the number in a block's mark (`capture.twins`): the same for blocks that are alike."""
    return mark.partition(":")[0]


@dataclass
class _Exemplar:
    """A block that is traced.

    Attributes:
        block: its mark.
        of: the exemplar that it is the witness of; 0: none.
        witness: its own; 0: there was none.
        brought: what its call brings, described; None: it stands for no other.
        before: what was changed before it.
        inputs: each tensor that it brings, and how often it was written.
        needs_grad: whether one of them needs a gradient.
        results: as an answer says; None: its trace has not come to its end, or it stands for no other.
        outputs: described, and whether each needs a gradient. No tensor: it would keep the trace alive.
    """

    block: str = ""
    of: int = 0
    witness: int = 0
    brought: object = None
    before: Changes | None = None
    inputs: Sequence[tuple[weakref.ref[Tensor], int]] = ()
    needs_grad: bool = False
    results: Sequence[int] | None = None
    outputs: Sequence[tuple[Sizes, torch.dtype, torch.device, bool]] = ()

    def end(self, outputs: Sequence[Tensor], results: Sequence[int]) -> None:
        """Notes what the block returns, unless outputs of a twin's node would look otherwise."""
        if self.brought is None or not all(map(is_plain_fake, outputs)):
            return
        inputs = [(value(), written) for value, written in self.inputs]
        if any(value is None or _written(value) != written for value, written in inputs):
            return
        given = {id(value): place for place, (value, _) in enumerate(inputs)}
        made = {id(value): value for value in outputs if id(value) not in given}
        # Python sees that no two of them are the same.
        if not made or len({*map(id, outputs)}) < len(outputs) or (len(made) < len(outputs) and not results):
            return
        # They need no gradient unless an input does: gradients may begin inside.
        if any(value.requires_grad for value in made.values()) and not self.needs_grad:
            return
        described = [_described(value) for value in made.values()]
        if None not in described:
            self.outputs = [output for output in described if output is not None]
            place_of = {key: place for place, key in enumerate(made)}
            place_of |= {key: len(made) + place for key, place in given.items()}
            self.results = [place_of[id(outputs[result - 1])] + 1 if result else 0 for result in results]

    def agrees_with(self, exemplar: _Exemplar) -> bool:
        """Whether it is a witness that returned what its exemplar did."""
        same = (self.results, self.outputs) == (exemplar.results, exemplar.outputs)
        return self.of > 0 and self.results is not None and same


# Of one trace, by its fake mode: a trace that is begun anew has another one. Number 0 is none.
_exemplars: weakref.WeakKeyDictionary[Any, list[_Exemplar]] = weakref.WeakKeyDictionary()


def _exemplars_beside(value: Tensor) -> list[_Exemplar]:
    return _exemplars.setdefault(fake_mode_of(value), [_Exemplar()])


def may_have_twins(answer: Tensor) -> bool:
    """Whether a block that is called as the one that got this answer had been a twin, if one more had come."""
    exemplars = _exemplars_beside(answer)
    _, number, *_ = answer.shape
    exemplar = exemplars[exemplars[number].of or number]
    return exemplars[exemplar.witness].agrees_with(exemplar)


def _ask_fake(inputs: Sequence[Tensor], numbers: Sequence[Any], block: str, said: str) -> Tensor:
    graph, described = surrounding_graph(), None if OTHER in said else _described_call(inputs)
    if graph is None or described is None or not all(map(is_known, numbers)):
        return _answer(inputs, 0, 0, 0)
    exemplars = _exemplars_beside(inputs[0])
    brought = (group_of(block), said, graph, ambient_modes(), *map(size_key, numbers), *described)
    before = Changes()
    of = 0
    for number, exemplar in enumerate(exemplars):
        if exemplar.results is None or exemplar.of or (exemplar.brought, exemplar.before) != (brought, before):
            continue
        if exemplars[exemplar.witness].agrees_with(exemplar):
            return _answer(inputs, 1, number, *exemplar.results)
        if not exemplar.witness and exemplar.block != block:
            of = number
            break
    if not before.tensors.isdisjoint(map(id, inputs)):
        return _answer(inputs, 0, 0, 0)  # what it is called with, it may read elsewhere too
    if of:
        exemplars[of].witness = len(exemplars)
    seen = [(weakref.ref(value), _written(value)) for value in inputs]
    exemplars.append(_Exemplar(block, of, 0, brought, before, seen, any(value.requires_grad for value in inputs)))
    return _answer(inputs, 0, len(exemplars) - 1, of)


def _answer(inputs: Sequence[Tensor], *sizes: int) -> Tensor:
    return inputs[0].new_empty(sizes, dtype=torch.bool)


def _end_fake(outputs: Sequence[Tensor], number: int, results: Sequence[int]) -> Tensor:
    if number:
        _exemplars_beside(outputs[0])[number].end(outputs, results)
    return outputs[0].new_empty(0, dtype=torch.bool)


def _twin_fake(inputs: Sequence[Tensor], numbers: Sequence[Any], block: str, number: int) -> list[Tensor]:
    mode = fake_mode_of(inputs[0])
    return [empty_of(sizes, dtype, device, mode) for sizes, dtype, device, _ in _exemplars[mode][number].outputs]


def _described_call(inputs: Sequence[Tensor]) -> list[object] | None:
    """Each input described, whether it is one before it, and which input of the graph it is."""
    if not all(map(is_plain_fake, inputs)):
        return None
    described = [_described(value) for value in inputs]
    first = {id(value): number for number, value in reversed(list(enumerate(inputs)))}
    given = graph_inputs()
    found = [(one, first[id(v)], given.get(id(v)), v.is_leaf) for one, v in zip(described, inputs, strict=True)]
    return None if None in described else list(found)


def _described(value: Tensor) -> tuple[Sizes, torch.dtype, torch.device, bool] | None:
    sizes = sizes_of(value)
    return None if sizes is None else (sizes, value.dtype, value.device, value.requires_grad)


def _written(value: Tensor) -> int:
    return 0 if value.is_inference() else version(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tensors, numbers, _, number = inputs
    described = _exemplars_beside(tensors[0])[number].outputs
    without = [value for value, (*_, needs_grad) in zip(output, described, strict=True) if not needs_grad]
    ctx.mark_non_differentiable(*without)
    ctx.read = tensors, len(numbers)


def _fake_gradients(ctx: Any, *grads: Any) -> Any:
    """Where forward asks for gradients (`torch.autograd.grad`): a trace asks for sizes alone."""
    tensors, numbers = ctx.read
    return [torch.empty_like(value) if value.requires_grad else None for value in tensors], [None] * numbers, None, None


def _only_traced(*args: Any) -> Any:
    raise AssertionError("it tells blocks apart while a model is traced; nothing runs it")


torch.library.register_fake("graphshard::ask_twin", _ask_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::end_exemplar", _end_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::twin", _twin_fake, lib=_LIBRARY)
torch.library.register_autograd("graphshard::twin", _fake_gradients, setup_context=_setup_context, lib=_LIBRARY)
for _name in ("ask_twin", "end_exemplar", "twin"):
    _LIBRARY.impl(_name, _only_traced, "CompositeExplicitAutograd")
