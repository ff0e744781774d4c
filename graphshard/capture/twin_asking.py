"""The call of a block in a trace: what is like a block that was traced already becomes one node (see `twin_calls`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.compat.dynamo import inline_only
from graphshard.graph.twin_calls import ASK, END, OTHER, TWIN

# On a block that may have twins: its mark, or "" (see `twins`).
TWIN_MARK = "_graphshard_twin"


def traced_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a block in a trace: of blocks that are alike, and called alike, one is traced (see `twin_calls`)."""

    def call_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block = self.__dict__[TWIN_MARK]
        tensors: list[Tensor] = []
        numbers: list[int] = []
        said = _said((args, tuple(kwargs.items())), tensors, numbers) if block else ""
        if not tensors:
            return call(self, *args, **kwargs)
        answer = ASK(tensors, numbers, block, said).shape
        if answer[0]:
            made = TWIN(tensors, numbers, block, answer[1])
            if len(answer) == 2:
                return made[0]
            both = [*made, *tensors]
            return tuple([both[at - 1] if at else None for at in answer[2:]])
        returned = call(self, *args, **kwargs)
        outputs, results = _listed(returned)
        if outputs:
            END(outputs, answer[1], results)
        return returned

    return inline_only(call_block)


@inline_only
def _said(value: Any, tensors: list[Tensor], numbers: list[int]) -> str:
    """A call's arguments as text, in which every tensor is alike and joins `tensors`, every int `numbers`; with
    `OTHER`, if there are any that text cannot tell apart, or that a block could change.
    """
    if type(value) is Tensor or type(value) is nn.Parameter:
        tensors.append(value)
        return "T" if type(value) is Tensor else "P"
    if value is None or value is True or value is False:
        return str(value)
    if type(value) is int:
        numbers.append(value)
        return "N"
    if type(value) is str:
        return f"{len(value)}'{value}'"
    if type(value) is tuple or type(value) is torch.Size:
        kind = "" if type(value) is tuple else "S"
        return f"{kind}(" + " ".join([_said(item, tensors, numbers) for item in value]) + ")"
    return OTHER


@inline_only
def _listed(returned: Any) -> tuple[list[Tensor], list[int]]:
    """The tensors that a block returned, and the results that `END` is told; no tensors: `END` cannot be told."""
    if type(returned) is Tensor:
        return [returned], []
    outputs: list[Tensor] = []
    results: list[int] = []
    if type(returned) is tuple:
        for result in returned:
            if type(result) is Tensor:
                outputs.append(result)
                results.append(len(outputs))
            elif result is None:
                results.append(0)
            else:
                return [], []
    return outputs, results
