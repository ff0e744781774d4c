"""Names of programs, which ranks have in common, and contracts that are made without a graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphshard.agree.contract import Contract, ContractParam
from graphshard.following.derived_contract import derived
from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.plan import PlannedBucket, PlannedStep
from graphshard.state.binding import Binding
from graphshard.state.shards import RESIDENT
from graphshard.state.signatures import contract_params, ordered_units, shown_state, state_text, structure
from graphshard.state.unit_state import KEEP, REACHED, RESHARD, UnitState

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(eq=False)
class FakeUnit:
    name: str
    position: int
    world_size: int = 2
    replicas: int = 1
    reduce_unused: bool = False
    params: tuple[str, ...] = ("a", "b")


@dataclass(eq=False)
class FakeShard:
    unit: FakeUnit
    index: int
    size: tuple[int, ...] = (4, 4)
    trainable: bool = True
    reduce_dtype: torch.dtype = F32
    bits: int = 0
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = torch.zeros(8, requires_grad=self.trainable)
        self.fqn = f"{self.unit.name}.{'ab'[self.index]}"
        self.param = SimpleNamespace(size=self.size, reduce_dtype=self.reduce_dtype)


def call(*shards: FakeShard) -> Binding:
    return Binding(shards)  # type: ignore[arg-type]


def two_units(**of_second: object) -> Binding:
    """Two parameters of each of two units, the second one's first, as a backward uses them."""
    first, second = FakeUnit("x", 0), FakeUnit("y", 1, **of_second)  # type: ignore[arg-type]
    return call(FakeShard(second, 0), FakeShard(second, 1, (4,)), FakeShard(first, 0), FakeShard(first, 1, (4,)))


USUAL = UnitState(DEFAULT_SETTINGS, RESHARD, True, None, ())


def test_places_of_parameters_are_in_the_order_of_the_model() -> None:
    assert contract_params(two_units()) == [
        ContractParam(0, 0, "x.a"),
        ContractParam(0, 1, "x.b"),
        ContractParam(1, 0, "y.a"),
        ContractParam(1, 1, "y.b"),
    ]


# -- structure


def test_structure_does_not_depend_on_the_order_in_which_a_graph_uses_parameters() -> None:
    binding = two_units()
    assert structure(binding, 0, True) == structure(call(*reversed(binding.shards)), 0, True)  # type: ignore[arg-type]
    assert [unit.name for unit in ordered_units(binding)] == ["x", "y"]


def test_structure_of_a_part_is_that_of_an_equal_block_and_that_of_a_whole_call_is_not() -> None:
    blocks = [call(FakeShard(FakeUnit(name, 3), 0)) for name in ("blocks.0", "blocks.1")]
    assert structure(blocks[0], 1, False) == structure(blocks[1], 1, False)
    assert structure(blocks[0], 1, True) != structure(blocks[1], 1, True)


@pytest.mark.parametrize("changes", [{"size": (4, 5)}, {"trainable": False}, {"index": 1}])
def test_structure_knows_what_a_program_gathers_and_reduces(changes: dict[str, object]) -> None:
    unit = FakeUnit("x", 0)
    usual, other = FakeShard(unit, 0), FakeShard(unit, **{"index": 0, **changes})  # type: ignore[arg-type]
    assert structure(call(usual), 0, False) != structure(call(other), 0, False)
    assert structure(call(usual), 0, False) != structure(call(usual), 1, False)


def test_structure_leaves_out_what_is_gathered_outside() -> None:
    outside = two_units(reduce_unused=True)
    assert structure(outside, 0, True) == structure(call(*outside.shards[2:]), 0, True)  # type: ignore[arg-type]


# -- states


def said(binding: Binding, state: UnitState, backward: bool = False) -> str:
    """The text of a call whose second unit, first in its graph, is in a state."""
    return state_text(binding, [state, USUAL], backward)


def test_usual_state_is_not_mentioned() -> None:
    assert said(two_units(), USUAL) == ""
    assert said(two_units(), replace(USUAL, slots=(REACHED, 0))) == ""


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (replace(USUAL, reduces=False), "1: unreduced"),
        (replace(USUAL, behind=KEEP), f"1: behind {KEEP}"),
        (replace(USUAL, post_forward=(2, "group 7")), "1: over 2"),
        (replace(USUAL, settings=UnitSettings(force_sum=True)), "1: force_sum=True"),
        (replace(USUAL, settings=UnitSettings(forward_prefetch=("x", "elsewhere"))), "1: 0,"),
        (replace(USUAL, settings=UnitSettings(scatter_group="7")), ""),
        (replace(USUAL, slots=(RESIDENT | REACHED, REACHED)), f"1: [(0, {RESIDENT | REACHED})]"),
    ],
)
def test_unusual_state_is_told_by_ordinal_without_names_of_units_or_groups(state: UnitState, text: str) -> None:
    assert said(two_units(), state) == text


def test_state_of_frozen_parameters_does_not_count_in_backward() -> None:
    unit, other = FakeUnit("y", 1), FakeUnit("x", 0)
    binding = call(FakeShard(unit, 0, trainable=False), FakeShard(other, 0))
    state = replace(USUAL, reduces=False, slots=(RESIDENT,))
    assert said(binding, state) != ""
    assert said(binding, state, backward=True) == ""


def test_unit_that_is_reduced_outside_has_no_other_state() -> None:
    assert said(two_units(reduce_unused=True), replace(USUAL, reduces=False, behind=KEEP)) == "1: outside"


# -- contracts without a graph

BASE = Contract(
    (
        PlannedBucket("g", "gather", ("y.a", "x.a")),
        PlannedBucket("h", "gather", ("x.b",)),
        PlannedBucket("r", "reduce", ("y.a", "y.b", "x.a", "x.b")),
    ),
    tuple(PlannedStep("mm", "launch", bucket) for bucket in "ghr"),
    (),
)
USUALLY = [USUAL, USUAL]
RESIDENT_Y = [replace(USUAL, slots=(RESIDENT | REACHED,) * 2), USUAL]


def launches(binding: Binding, states: list[UnitState], base: Contract | None = None, backward: bool = True) -> str:
    found = derived(base, binding, states, backward)
    return "; ".join(f"{kind} {' '.join(members)}" for kind, members in found.launches)


def test_without_a_base_units_are_gathered_first_and_reduced_last() -> None:
    assert launches(two_units(), USUALLY) == "gather y.a y.b; gather x.a x.b; reduce y.a y.b; reduce x.a x.b"
    assert launches(two_units(), USUALLY, backward=False) == "gather y.a y.b; gather x.a x.b"


def test_buckets_of_the_base_stay_as_far_as_they_are_wanted() -> None:
    needed = frozenset({"x.a", "x.b", "y.a"})
    found = derived(BASE, two_units(), USUALLY, True, needed)
    assert (found.buckets, found.steps) == (BASE.buckets, BASE.steps)
    unreduced = derived(BASE, two_units(), [replace(USUAL, reduces=False)] * 2, True, needed)
    assert [bucket.name for bucket in unreduced.buckets] == [step.bucket for step in unreduced.steps] == ["g", "h"]


def test_what_is_resident_is_not_gathered_and_what_is_not_reached_not_reduced() -> None:
    assert launches(two_units(), RESIDENT_Y, BASE) == "gather x.a; gather x.b; reduce y.a y.b x.a x.b"
    unreached = [replace(USUAL, slots=(REACHED, 0)), USUAL]
    assert launches(two_units(), unreached).endswith("; reduce y.a; reduce x.a x.b")


def test_what_the_base_lacks_is_gathered_first_and_reduced_last_and_steps_are_void() -> None:
    base = replace(BASE, buckets=(PlannedBucket("h", "gather", ("x.a", "x.b")), PlannedBucket("r", "reduce", ("x.a",))))
    want = "gather y.a y.b; gather x.a x.b; reduce x.a; reduce y.a y.b; reduce x.b"
    assert launches(two_units(), USUALLY, base) == want
    assert derived(base, two_units(), USUALLY, True).steps == ()


def test_backward_gathers_what_it_needs_even_where_its_base_found_it_gathered() -> None:
    base = replace(BASE, buckets=(PlannedBucket("g", "gather", ("y.a",)), BASE.buckets[2]))
    found = derived(base, two_units(), USUALLY, True, frozenset({"x.a", "y.a"}))
    assert [bucket.members for bucket in found.buckets if bucket.kind == "gather"] == [("x.a",), ("y.a",)]


def test_nothing_is_sent_where_nothing_is_sharded_and_reduced_where_there_are_copies() -> None:
    alone, copied = (two_units(world_size=1, replicas=replicas) for replicas in (1, 2))
    assert launches(alone, USUALLY) == "gather x.a x.b; reduce x.a x.b"
    assert launches(copied, USUALLY) == "gather x.a x.b; reduce y.a y.b; reduce x.a x.b"


def test_frozen_parameters_are_not_reduced_and_dtypes_apart() -> None:
    unit = FakeUnit("x", 0)
    assert (
        launches(call(FakeShard(unit, 0, trainable=False), FakeShard(unit, 1)), [USUAL]) == "gather x.a x.b; reduce x.b"
    )
    mixed = call(FakeShard(unit, 0, reduce_dtype=BF16), FakeShard(unit, 1))
    assert launches(mixed, [USUAL]) == "gather x.a; gather x.b; reduce x.a; reduce x.b"


def test_errors_show_of_a_state_what_users_have_set() -> None:
    assert shown_state("0: behind 1 [(0, 1), (1, 1)]; 1: unreduced [(0, 65)]; 3: outside") == "1: unreduced; 3: outside"
    assert shown_state("0: behind 1 [(0, 1)]") == shown_state("") == ""


def test_casts_that_stay_are_no_state_that_ranks_share() -> None:
    """A gathered value of a parameter that is not sharded: one rank has kept it, another has not."""
    for world_size, is_told in ((1, False), (2, True)):
        binding = call(FakeShard(FakeUnit("x", 0, world_size=world_size), 0))
        states = [[replace(USUAL, slots=(bits,))] for bits in (REACHED, REACHED | RESIDENT)]
        without, kept = (state_text(binding, found, backward=True) for found in states)
        assert (kept != without) is is_told


def test_backward_tells_which_frozen_units_of_its_forward_stay_gathered() -> None:
    """What it gathers depends on it, and which of them its graph has is the partitioner's choice."""
    units = [FakeUnit(name, number) for number, name in enumerate("xy")]
    forward = call(*(FakeShard(unit, 0, trainable=False, bits=RESIDENT) for unit in units))
    sharded = call(*(FakeShard(unit, 0, trainable=False) for unit in units))
    texts = [state_text(call(of.shards[1]), [USUAL], True, of) for of in (forward, sharded)]  # type: ignore[arg-type]
    assert texts == ["frozen gathered: 0, 1", ""]
    assert shown_state(texts[0]) == ""
