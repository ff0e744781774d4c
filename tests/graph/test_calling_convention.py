"""Which program a call needs: its flags, and the slots of its extra arguments and results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.ir import Flags
from graphshard.state.binding import Binding
from graphshard.state.calling_convention import CallingConvention, calling_convention
from graphshard.state.shards import HELD, PARTIAL, PENDING, POST_FORWARD, RESIDENT
from graphshard.state.unit_state import AGAIN, KEEP, REACHED, RESHARD, TO_POST_FORWARD, UnitState
from tests.graph.graphs import BF16, F32


@dataclass(eq=False)
class FakeUnit:
    name: str
    post_forward: tuple[int, str] = (2, "7")
    post_forward_rank: int = 1
    params: tuple[str, ...] = ("a",)
    device: torch.device = torch.device("cpu")  # noqa: RUF009


@dataclass(eq=False)
class FakeShard:
    """What a convention reads of a shard; tensors are there where a test holds something."""

    unit: FakeUnit
    index: int
    trainable: bool = True
    is_whole: bool = False
    full: Tensor | None = None
    post_forward: Tensor | None = None
    held: Tensor | None = None
    pending: Tensor | None = None
    partial: Tensor | None = None
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = torch.zeros(2, requires_grad=self.trainable)


NAMES = ["first_a", "first_b", "second_a", "root_a"]
STATE = UnitState(DEFAULT_SETTINGS, RESHARD, True, None, ())
GATHERED = frozenset(range(4))
REDUCED = {0: 5, 1: 2, 2: 0, 3: 1}  # slot -> position among the results


def binding(**root: Any) -> Binding:
    """Two parameters of one unit, one of another, one of the root with `root`'s attributes."""
    first, second, top = FakeUnit("first", params=("a", "b")), FakeUnit("second", (2, "8"), 3), FakeUnit("")
    shards = (FakeShard(first, 0), FakeShard(first, 1), FakeShard(second, 0), FakeShard(top, 0, **root))
    return Binding(shards)  # type: ignore[arg-type]


def states(root: UnitState = STATE, second: UnitState = STATE) -> list[UnitState]:
    return [STATE, second, root]


def forward(call: Binding, root: UnitState = STATE) -> CallingConvention:
    return calling_convention(NAMES, GATHERED, {}, call, states(root))


def backward(call: Binding, root: UnitState = STATE, **asked: Any) -> CallingConvention:
    return calling_convention(NAMES, GATHERED, REDUCED, call, states(root), **asked)


def test_binding_groups_slots_by_unit() -> None:
    call = binding()
    assert call.grouping == ((0, 0), (0, 1), (1, 0), (2, 0))
    assert [unit.name for unit in call.units] == ["first", "second", ""]
    assert call.slots == [[0, 1], [2], [3]]


def test_binding_overlaps_in_trainable_shards() -> None:
    call, frozen = binding(), binding(trainable=False)
    other = Binding((call.shards[3], call.shards[0]))
    assert call.overlap(other) == {call.shards[3], call.shards[0]}
    assert call.overlap(binding()) == frozenset()
    assert frozen.overlap(Binding((frozen.shards[3],))) == frozenset()


def test_binding_of_equal_blocks_has_one_key() -> None:
    call, other = binding(), binding()
    assert call.key(states()) == other.key(states())
    assert call.key(states()) != call.key(states(root=replace(STATE, behind=KEEP)))
    assert call.key(states()) != call.key(states(root=replace(STATE, slots=(HELD | REACHED,))))


def test_binding_key_says_which_of_its_units_are_prefetched() -> None:
    chosen = replace(STATE, settings=UnitSettings(forward_prefetch=("second", "elsewhere")))
    _, _, ((settings, forward_ordinals, backward_ordinals), *_) = binding().key(states(root=chosen))  # type: ignore[misc]
    assert (settings, forward_ordinals, backward_ordinals) == (UnitSettings(), (1,), ())  # names differ between blocks


def test_plan_of_the_default_is_empty() -> None:
    for convention in (forward(binding()), backward(binding())):
        assert convention == CallingConvention()
        assert convention.flags == Flags()
        assert convention.extra_args(binding().shards) == []


def test_plan_keeps_what_stays_gathered() -> None:
    convention = forward(binding(), replace(STATE, behind=KEEP))
    assert (convention.kept, convention.flags.kept) == ([3], ("root_a",))
    assert not convention.resident and not convention.dropped


def test_plan_keeps_nothing_that_is_whole() -> None:
    assert forward(binding(is_whole=True), replace(STATE, behind=KEEP)) == CallingConvention()


def test_plan_keeps_nothing_that_the_graph_does_not_gather() -> None:
    convention = calling_convention(NAMES, frozenset({0}), REDUCED, binding(), states(replace(STATE, behind=KEEP)))
    assert convention == CallingConvention()


@pytest.mark.parametrize("behind", [RESHARD, KEEP, TO_POST_FORWARD])
def test_plan_takes_what_is_gathered_already(behind: int) -> None:
    full = torch.ones(3)
    call = binding(full=full)
    convention = forward(call, replace(STATE, behind=behind, slots=(RESIDENT,)))
    assert (convention.flags.resident, convention.flags.kept) == (("root_a",), ())
    assert convention.extra_args(call.shards) == [full]
    assert convention.dropped == ([3] if behind == RESHARD else [])


def test_plan_reshards_to_fewer_ranks() -> None:
    convention = forward(binding(), replace(STATE, behind=TO_POST_FORWARD, post_forward=(2, "1")))
    assert convention.flags.resharded == ("root_a",)
    assert convention.ranks == {(2, "7"): (1, torch.device("cpu"))}
    assert [arg.tolist() for arg in convention.extra_args(binding().shards)] == [[1]]


@pytest.mark.parametrize(("behind", "kept", "dropped"), [(RESHARD, (), [3]), (KEEP, ("root_a",), []),
                                                         (TO_POST_FORWARD, (), [])])  # fmt: skip
def test_plan_gathers_from_fewer_ranks(behind: int, kept: tuple[str, ...], dropped: list[int]) -> None:
    part = torch.ones(3)
    call = binding(post_forward=part)
    convention = backward(call, UnitState(DEFAULT_SETTINGS, behind, True, (2, "1"), (POST_FORWARD | REACHED,)))
    assert (convention.flags.rejoined, convention.flags.kept, convention.flags.resharded) == (("root_a",), kept, ())
    assert convention.extra_args(call.shards) == [part]
    assert convention.dropped == dropped


def test_plan_drops_nothing_that_a_later_call_of_the_backward_uses() -> None:
    slots = (RESIDENT | AGAIN | REACHED,)
    assert not backward(binding(full=torch.ones(3)), replace(STATE, slots=slots)).dropped


def test_plan_leaves_gradients_unreduced_without_gradient_sync() -> None:
    convention = backward(binding(), replace(STATE, reduces=False))
    assert (convention.unreduced, convention.again, convention.local) == ([(3, 1)], [], [])
    assert convention.flags.unreduced == {"root_a"}


def test_plan_adds_what_is_held() -> None:
    held = torch.ones(3, dtype=BF16)
    call = binding(held=held)
    convention = backward(call, replace(STATE, slots=(HELD | REACHED,)))
    assert convention.flags == Flags(added=(("root_a", BF16),))
    assert convention.extra_args(call.shards) == [held]
    unsynchronized = backward(call, replace(STATE, reduces=False, slots=(HELD | REACHED,)))
    assert unsynchronized.flags == Flags(unreduced=frozenset({"root_a"}), added=(("root_a", BF16),))


def test_plan_adds_calls_of_one_backward_before_earlier_backwards() -> None:
    held, pending = torch.ones(3), torch.ones(3, dtype=BF16)
    call = binding(held=held, pending=pending)
    convention = backward(call, replace(STATE, slots=(HELD | PENDING | REACHED,)))
    assert convention.flags.added == (("root_a", BF16), ("root_a", F32))
    assert [arg is want for arg, want in zip(convention.extra_args(call.shards), (pending, held), strict=True)] == [
        True
    ] * 2
    unsynchronized = backward(call, replace(STATE, reduces=False, slots=(HELD | PENDING | REACHED,)))
    assert unsynchronized.flags == replace(convention.flags, unreduced=frozenset({"root_a"}))


def test_plan_only_sums_while_another_call_follows() -> None:
    convention = backward(binding(held=torch.ones(3)), replace(STATE, slots=(HELD | AGAIN | REACHED,)))
    assert (convention.again, convention.unreduced) == ([(3, 1)], [])
    assert convention.flags == Flags(unreduced=frozenset({"root_a"}))


@pytest.mark.parametrize("all_reduce", [False, True])
def test_plan_adds_partial_gradients_and_leaves_them_partial_as_asked(all_reduce: bool) -> None:
    partial, unit_settings = torch.ones(2), UnitSettings(all_reduce=all_reduce)
    call = binding(partial=partial)
    convention = backward(call, UnitState(unit_settings, RESHARD, True, None, (PARTIAL | REACHED,)))
    assert convention.flags.partial == ("root_a",)
    assert convention.local == ([] if all_reduce else [(3, 1)])
    assert convention.flags.units == (() if all_reduce else (("", unit_settings),))
    assert convention.extra_args(call.shards) == [partial]


def test_plan_does_nothing_about_a_gradient_that_this_call_does_not_give() -> None:
    call = binding(held=torch.ones(3))
    for asked in ({"undefined": frozenset({"tangents_1"})}, {"inputs_only": True}):
        convention = backward(call, replace(STATE, reduces=False, slots=(HELD,)), **asked)
        assert not convention.unreduced and not convention.added
        assert convention.flags == Flags(**asked)


def test_plan_of_gradients_of_inputs_takes_what_is_gathered() -> None:
    convention = backward(binding(full=torch.ones(3)), replace(STATE, slots=(RESIDENT | REACHED,)), inputs_only=True)
    assert convention.flags == Flags(resident=("root_a",), inputs_only=True)


def test_plan_orders_extra_arguments_as_the_flags() -> None:
    first, second, top = FakeUnit("first", params=("a", "b")), FakeUnit("second", (2, "8"), 3), FakeUnit("")
    full, part, held, partial = (torch.full((1,), float(i)) for i in range(4))
    shards = (
        FakeShard(first, 0, partial=partial),
        FakeShard(first, 1, full=full),
        FakeShard(second, 0),
        FakeShard(top, 0, post_forward=part, held=held),
    )
    call = Binding(shards)  # type: ignore[arg-type]
    found = [
        replace(STATE, behind=KEEP, slots=(PARTIAL | REACHED, RESIDENT | REACHED)),
        replace(STATE, behind=TO_POST_FORWARD),
        replace(STATE, slots=(POST_FORWARD | HELD | REACHED,)),
    ]
    convention = calling_convention(NAMES, GATHERED, REDUCED, call, found)
    assert convention.flags == Flags(
        resident=("first_b",),
        rejoined=("root_a",),
        kept=("first_a",),
        resharded=("second_a",),
        added=(("root_a", F32),),
        partial=("first_a",),
    )
    assert [float(arg) for arg in convention.extra_args(call.shards)] == [0, 1, 3, 2, 3]
