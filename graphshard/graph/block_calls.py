"""Operators that stand for a block of a model while the rest of it is traced and parted into forward and backward: the
block is traced and parted once by itself, and its nodes take the place of each call behind that.

A call is known by a name, ``body#number``. Its values are what the trace of the body found (`register`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphshard.graph.ir import output_args

_LIBRARY: Any = torch.library.Library("graphshard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("block(Tensor[] inputs, str call) -> Tensor[]")
_LIBRARY.define("block_saving(Tensor[] inputs, str call) -> Tensor[]")
_LIBRARY.define("block_backward(Tensor[] grads, str call) -> Tensor[]")
_LIBRARY.define("pass_on(Tensor value, int[]? stride=None) -> Tensor")

BLOCK = torch.ops.graphshard.block.default
# Returns what backward reads, too.
BLOCK_SAVING = torch.ops.graphshard.block_saving.default
# In front of the gradients it takes what was saved, once `split_blocks` has said what that is.
BLOCK_BACKWARD = torch.ops.graphshard.block_backward.default
# With strides, a trace has the gradient of what it yields in these.
PASS_ON = torch.ops.graphshard.pass_on.default


class OtherGradients(Exception):
    """Backward brings a block other gradients than its body was traced with.

    Args:
        said: what they are like.
        body: its name.
        output: the number of an output.
        stride: of the output's gradient; None: there is none, or it is of another dtype.
    """

    @property
    def asked(self) -> tuple[str, int, tuple[int, ...]] | None:
        """The body, the output and the strides with which it would do; None: none."""
        _, body, output, stride = self.args
        return None if stride is None else (body, output, stride)

    def __str__(self) -> str:
        return str(self.args[0]).partition("\n")[0]  # torch writes below it where a graph stood


@dataclass(frozen=True, eq=False)
class Body:
    """What all calls of equal blocks stand for.

    Attributes:
        forward: takes inputs; returns outputs, then what backward reads and is neither input nor output.
        outputs: fake values.
        backward: takes what is saved, then gradients of outputs; returns gradients of inputs (None: there is none).
            None: no gradient is asked for.
        saved: for each value that backward reads, its place among the inputs and results of forward.
        taken: (number of an output, fake value of its gradient).
        grads: fake values of the gradients of its inputs.
        needs_grad: whether each of its inputs needs a gradient.
    """

    forward: GraphModule
    outputs: tuple[Tensor, ...]
    backward: GraphModule | None = None
    saved: tuple[int, ...] = ()
    taken: tuple[tuple[int, Tensor], ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    needs_grad: tuple[bool, ...] = ()


_bodies: weakref.WeakValueDictionary[str, Body] = weakref.WeakValueDictionary()


def body_of(call: str) -> Body:
    """The body that a call stands for."""
    return _bodies[_name_of(call)]


def _name_of(call: str) -> str:
    return call.partition("#")[0]


def register(name: str, body: Body) -> None:
    """Lets calls find `body`, as long as somebody keeps it. Names are unique in the process."""
    _bodies[name] = body


def call_block(call: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Calls a block while its surroundings are traced.

    Raises:
        OtherGradients: an input needs a gradient that the body does not make.
    """
    body = body_of(call)
    if any(value.requires_grad and not needs for value, needs in zip(inputs, body.needs_grad, strict=True)):
        raise OtherGradients("a value needs a gradient that it did not need when it was captured", "", 0, None)
    if body.taken:
        outputs: tuple[Tensor, ...] = BlockCall.apply(call, *inputs)  # type: ignore[no-untyped-call]
        return outputs
    return tuple(BLOCK(list(inputs), call))


class BlockCall(torch.autograd.Function):
    """Asks for the gradients of a block where its outputs get some."""

    @staticmethod
    def forward(ctx: Any, call: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = tuple(BLOCK(list(inputs), call))
        taken = {number for number, _ in body_of(call).taken}
        ctx.mark_non_differentiable(*(value for number, value in enumerate(outputs) if number not in taken))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        body, name = body_of(ctx.call), _name_of(ctx.call)
        taken = []
        for number, want in body.taken:
            grad = grads[number]
            if grad is None:
                raise OtherGradients("the loss does not depend on all that a block returns", name, number, None)
            if grad.dtype != want.dtype:
                raise OtherGradients(f"a gradient is {grad.dtype}, its value {want.dtype}", name, number, None)
            if grad.stride() != want.stride():
                raise OtherGradients(
                    f"a gradient has strides {grad.stride()}, another {want.stride()}", name, number, grad.stride()
                )
            taken.append(grad)
        given = iter(BLOCK_BACKWARD(taken, ctx.call))
        return None, *(None if grad is None else next(given) for grad in body.grads)


def _like(value: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    return torch.empty_strided(value.shape, stride or value.stride(), dtype=value.dtype, device=value.device)


def _block_fake(inputs: Sequence[Tensor], call: str) -> list[Tensor]:
    return [_like(value) for value in body_of(call).outputs]


def _block_saving_fake(inputs: Sequence[Tensor], call: str) -> list[Tensor]:
    return [_like(node.meta["val"]) for node in output_args(body_of(call).forward.graph)]


def _block_backward_fake(grads: Sequence[Tensor], call: str) -> list[Tensor]:
    return [_like(value) for value in body_of(call).grads if value is not None]


def _pass_on_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return PASS_ON(grad), None


def _only_traced(*args: Any) -> Any:
    raise AssertionError("it stands for others while a model is traced; nothing runs it")


torch.library.register_fake("graphshard::block", _block_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::block_saving", _block_saving_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::block_backward", _block_backward_fake, lib=_LIBRARY)
torch.library.register_fake("graphshard::pass_on", _like, lib=_LIBRARY)
torch.library.register_autograd("graphshard::pass_on", _pass_on_backward, lib=_LIBRARY)
for _name in ("block", "block_saving", "block_backward", "pass_on"):
    _LIBRARY.impl(_name, _only_traced, "CompositeExplicitAutograd")
