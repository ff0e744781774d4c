"""What Python sees of blocks: the same of those that do the same, and not the same once one is changed."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from graphshard.capture.alike import BlockState, indices
from graphshard.capture.twin_asking import TWIN_MARK
from graphshard.capture.twins import Twins, candidates

SHARED, SCALE = object(), torch.ones(4)


@dataclass
class Config:
    width: int = 4
    kinds: list[str] = field(default_factory=lambda: ["a", "b"])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.rate = 0.5
        self.inner = Inner()
        self.config = Config()
        self.names, self.kinds, self.table = ["a"], {"a", "b"}, {"a": 1}
        self.shared = SHARED
        self.make = partial(torch.zeros, 4, dtype=torch.float64)
        self.method = self.inner.forward
        self.function = scaled(2.0)
        self.style = ColwiseParallel()
        self.register_buffer("nothing", None)
        self.itself: list[object] = []
        self.itself.append(self.itself)


def scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * by


def swap_key(block: Block) -> None:
    block.table = block.table.copy()
    block.table["b"] = block.table.pop("a")


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda block: setattr(block, "rate", 0.25),
    "an attribute of another type": lambda block: setattr(block, "rate", 1),
    "a new attribute": lambda block: setattr(block, "more", 1),
    "no attribute": lambda block: delattr(block, "rate"),
    "another attribute": lambda block: (delattr(block, "rate"), setattr(block, "ratio", 0.5)),
    "a mode": lambda block: block.inner.eval(),
    "a class": lambda block: setattr(block.inner, "__class__", type("Other", (Inner,), {})),
    "a parameter's gradient": lambda block: block.inner.weight.requires_grad_(False),
    "a parameter's shape": lambda block: setattr(block.inner.weight, "data", torch.zeros(5)),
    "a parameter's dtype": lambda block: block.inner.double(),
    "a parameter more": lambda block: setattr(block.inner, "bias", nn.Parameter(torch.zeros(4))),
    "a buffer's dtype": lambda block: setattr(block.inner, "scale", torch.ones(4, dtype=torch.int64)),
    "no buffer": lambda block: setattr(block.inner, "scale", None),
    "a buffer where none was": lambda block: setattr(block, "nothing", torch.ones(4)),
    "a default": lambda block: setattr(block.function, "__defaults__", (3.0,)),
    "a tied buffer": lambda block: block.register_buffer("scale", block.inner.scale),
    "a module more": lambda block: block.inner.add_module("more", nn.Identity()),
    "another module": lambda block: setattr(block, "inner", nn.Identity()),
    "a module's name": lambda block: (block.add_module("outer", block.inner), delattr(block, "inner")),
    "an object": lambda block: setattr(block, "shared", object()),
    "an item": lambda block: block.names.append("b"),
    "another item": lambda block: block.names.__setitem__(0, "b"),
    "a key": swap_key,
    "a value": lambda block: block.table.__setitem__("a", 2),
    "a set": lambda block: block.kinds.add("c"),
    "a setting": lambda block: setattr(block.config, "width", 8),
    "a setting's item": lambda block: block.config.kinds.append("c"),
    "a function": lambda block: setattr(block, "make", partial(torch.zeros, 4)),
    "what a function holds": lambda block: setattr(block, "function", scaled(3.0)),
    "what a function holds from now on": lambda block: setattr(block.function.__closure__[0], "cell_contents", 3.0),
    "a style": lambda block: setattr(block, "style", ColwiseParallel(use_local_output=False)),
    "a method": lambda block: setattr(block, "method", block.inner.extra_repr),
    "forward": lambda block: setattr(block, "forward", torch.relu),
}


def seen(block: nn.Module) -> object:
    state = BlockState(block)
    return state.structure, state.common(())


def test_blocks_made_alike_are_seen_alike() -> None:
    assert seen(Block()) == seen(Block())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_block_is_seen_to_be_another(change: Callable[[Any], object]) -> None:
    block = Block()
    state = BlockState(block)
    assert state.is_current()
    change(block)
    assert not state.is_current()
    assert seen(block) != seen(Block())


@pytest.mark.parametrize(
    "register",
    [
        lambda block, hook: block.register_forward_hook(hook),
        lambda block, hook: block.inner.register_forward_pre_hook(hook),
        lambda block, hook: block.register_full_backward_hook(hook),
        lambda block, hook: block.register_full_backward_pre_hook(hook),
    ],
)
def test_hooks_are_seen(register: Callable[[nn.Module, Any], object]) -> None:
    def hook(*_: object) -> None: ...

    one, other = Block(), Block()
    register(one, hook)
    assert seen(one) != seen(other)
    register(other, hook)
    assert seen(one) == seen(other)


@pytest.mark.parametrize(
    "values, found", [([0, 1, 2], True), (["a", "b", "c"], True), ([0, 1, 1], False), ([0.5, 1.5, 2.5], False)]
)
def test_attributes_that_number_blocks_are_found(values: list[Any], found: bool) -> None:
    blocks = [Block() for _ in values]
    for block, value in zip(blocks, values, strict=True):
        block.number = value
    states = [BlockState(block) for block in blocks]
    assert {states[0].scalars[at][0] for at in indices(states)} == ({"number"} if found else set())


def marks(blocks: list[Any]) -> list[str]:
    """Without in which respects they are alike."""
    return [re.sub(r"\.\d+", "", vars(block)[TWIN_MARK]) for block in blocks]


def test_marks_follow_what_blocks_have_in_common() -> None:
    blocks: list[Any] = [Block(number) for number in range(4)]
    twins = Twins(nn.ModuleList(blocks), blocks, str)
    assert marks(blocks) == [""] * 4
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "0:1", "0:2", "0:3"]
    for block in blocks:  # all in the same way: they stay alike
        block.rate = 1.0
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "0:1", "0:2", "0:3"]
    blocks[0].rate = blocks[2].rate = 2.0
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "1:1", "0:2", "1:3"]
    blocks[0].inner.scale = blocks[2].inner.scale  # one tensor of both
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "1:1", "0:2", "1:3"]
    blocks[1].inner.scale = blocks[2].inner.scale  # of a third, which is no twin of theirs
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "", "0:2", ""]


@pytest.mark.parametrize(
    "change",
    [
        lambda block, number: setattr(block, "number", 7),
        lambda block, number: setattr(block.inner, "scale", SCALE),
        lambda block, number: block.register_buffer("unread", torch.ones(4)),
    ],
    ids=["numbers are equal", "a buffer is shared", "a buffer more"],
)
def test_marks_say_in_which_respects_blocks_are_alike(change: Callable[[Any, int], object]) -> None:
    blocks: list[Any] = [Block(number) for number in range(3)]
    twins = Twins(nn.ModuleList(blocks), blocks, str)
    twins.refresh(False)
    before = [vars(block)[TWIN_MARK] for block in blocks]
    for number, block in enumerate(blocks):
        change(block, number)
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "0:1", "0:2"]
    assert before != [vars(block)[TWIN_MARK] for block in blocks]


def test_blocks_that_change_often_are_no_longer_alike() -> None:
    said: list[str] = []
    blocks: list[Any] = [Block() for _ in range(3)]
    twins = Twins(nn.ModuleList(blocks), blocks, said.append)
    for count in range(6):
        blocks[1].rate = 0.5 + count % 2
        twins.refresh(False)
    assert marks(blocks) == [""] * 3
    assert said == ["blocks are captured one by one: they change too often"]


def test_block_that_holds_a_tensor_is_like_no_other_and_keeps_it_not_alive() -> None:
    blocks: list[Any] = [Block() for _ in range(4)]
    blocks[1].kept = torch.zeros(4)
    twins = Twins(nn.ModuleList(blocks), blocks, str)
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "", "0:2", "0:3"]
    kept = weakref.ref(blocks[1].kept)
    blocks[1].kept = None
    assert kept() is None


def test_blocks_whose_numbers_are_read_are_not_alike() -> None:
    blocks: list[Any] = [Block(number) for number in range(3)]
    twins = Twins(nn.ModuleList(blocks), blocks, str)
    twins.refresh(False)
    assert not twins.learn_read(["self.blocks[0].rate", "self.numbers"])
    assert marks(blocks) == ["0:0", "0:1", "0:2"]
    assert twins.learn_read(["L['self'].blocks[0].number"])
    assert marks(blocks) == [""] * 3
    blocks[0].rate = 1.0
    twins.refresh(False)
    assert marks(blocks) == [""] * 3


def test_tensors_of_a_block_are_those_it_has_now() -> None:
    blocks: list[Any] = [Block() for _ in range(3)]
    twins = Twins(nn.ModuleList(blocks), blocks, str)
    twins.refresh(False)
    blocks[1].inner = Inner()
    blocks[1].method = blocks[1].inner.forward
    twins.refresh(False)
    assert marks(blocks) == ["0:0", "0:1", "0:2"]
    assert [*map(id, twins.tensors("0.0:1"))] == [id(blocks[1].inner.weight), id(blocks[1].inner.scale)]
    assert twins.tensors_at([("0.0:1", 1)])[0] is blocks[1].inner.scale


def test_candidates_are_the_outermost_blocks_of_one_class() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    model = nn.Sequential(nn.LayerNorm(2), *blocks)
    modules = list(model.modules())
    assert candidates(modules) == blocks
    linears = [linear for block in blocks for linear in block]
    assert candidates([module for module in modules if module not in blocks[1:]]) == linears


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_without_strides_are_like_no_others() -> None:
    blocks: list[Any] = [Block() for _ in range(3)]
    for block in blocks[1:]:
        block.register_buffer("edges", torch.eye(4).to_sparse_csr())
    assert BlockState(blocks[1]).structure == BlockState(blocks[1]).structure != BlockState(blocks[2]).structure


def test_blocks_that_cannot_be_looked_at_are_like_no_others() -> None:
    blocks: list[Any] = [Block() for _ in range(3)]
    said: list[str] = []
    twins = Twins(nn.ModuleList(blocks), blocks, said.append)
    del vars(blocks[1])["_buffers"]
    twins.refresh(False)
    assert marks(blocks) == [""] * 3
    assert said == ["blocks are captured one by one: what they hold cannot be looked at (KeyError: '_buffers')"]
