"""The harness itself: comparisons that see the last bit, parity checks that fail when the engine is broken."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from graphshard.testing import (
    Bitwise,
    ParityError,
    Tolerance,
    TrainingRun,
    Ulps,
    Where,
    WorkerPool,
    check_parity,
    compare_named,
    compare_nested,
    compare_tensors,
    mutants,
    training_test,
    ulp_distance,
)

FAR = torch.iinfo(torch.int64).max
HERE = Where("gradient", step=2, rank=0)


class Net(nn.Module):
    """Two equal blocks, an uneven head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


def net_inputs(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + rank)),)


# --- distances and tolerances


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulp_distance_counts_representable_numbers(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    above = torch.nextafter(one.float(), torch.full((1,), 2.0)) if dtype == torch.float32 else one
    if dtype == torch.float32:
        assert ulp_distance(one, above).item() == 1
    eps = torch.finfo(dtype).eps
    assert ulp_distance(one, one + 3 * eps).item() == 3
    tiny = torch.full((1,), torch.finfo(dtype).smallest_normal, dtype=dtype)
    zero, minus_zero = torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)
    assert ulp_distance(zero, minus_zero).item() == 0
    assert ulp_distance(tiny, -tiny).item() == 2 * ulp_distance(zero, tiny).item()
    nan = torch.full((1,), math.nan, dtype=dtype)
    assert [ulp_distance(nan, one).item(), ulp_distance(nan, -nan).item()] == [FAR, 0]


def test_ulp_distance_of_far_fp64_saturates() -> None:
    big = torch.full((1,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ulp_distance(big, -big).item() == FAR


def test_bitwise_says_what_differs() -> None:
    want = torch.arange(6, dtype=torch.float32).view(2, 3)
    got = want.clone()
    got[0, 2] = torch.nextafter(got[0, 2], torch.tensor(9.0))
    got[1, 1] += 1
    message = "\n".join(
        [
            r"gradient 'head.bias', step 2, rank 0: 2 of 6 elements differ by more than Bitwise .* allows",
            r"  largest: index \[1, 1\], got 5.0, want 4.0 \(2097152 ulp, 1\)",
            r"  first: index \[0, 2\], got 2.0000002\d*, want 2.0 \(1 ulp, 2.38e-07\)",
        ]
    )
    with pytest.raises(ParityError, match=message):
        compare_named({"head.bias": got}, {"head.bias": want}, tolerance=Bitwise(), where=HERE)
    got[1, 1] -= 1
    assert compare_tensors(got, want, tolerance=Ulps(1, "for this test"), where=HERE) == 1


@pytest.mark.parametrize(
    ("got", "want", "accepting", "rejecting"),
    [
        (-0.0, 0.0, Bitwise("for this test", equal_zeros="the sign of an empty sum"), Bitwise()),
        (math.nan, math.nan, Bitwise(nan="same places"), Bitwise()),
        (math.nan, math.nan, Ulps(0, "for this test", nan="same places"), Ulps(9, "for this test")),
        (1e-9, -1e-9, Ulps(0, "sums cancel", atol=1e-8), Ulps(1000, "for this test")),
    ],
)
def test_tolerance_is_explicit(got: float, want: float, accepting: Tolerance, rejecting: Tolerance) -> None:
    ours, theirs = torch.tensor([got]), torch.tensor([want])
    compare_tensors(ours, theirs, tolerance=accepting, where=HERE)
    with pytest.raises(ParityError):
        compare_tensors(ours, theirs, tolerance=rejecting, where=HERE)


def test_nan_never_equals_a_number() -> None:
    with pytest.raises(ParityError, match="NaN"):
        compare_tensors(torch.tensor([math.nan]), torch.ones(1), tolerance=Bitwise(nan="same places"), where=HERE)


def test_ulps_want_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Ulps(1, " ")


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ({"a": None}, {"a": torch.ones(2)}, r"'a', step 2, rank 0: got None, want a tensor torch.float32\[2\]"),
        ({"a": None, "b": None}, {"b": None, "a": None}, r"order of names: got \['a', 'b'\], want \['b', 'a'\]"),
        ({"a": None}, {"b": None}, r"missing \['b'\], unexpected \['a'\]"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, 1)}, r"got torch.float32\[2\], want torch.float32\[2, 1\]"),
    ],
)
def test_compare_named_sees_names_order_and_none(got: Any, want: Any, message: str) -> None:
    with pytest.raises(ParityError, match=message):
        compare_named(got, want, tolerance=Bitwise(), where=HERE)


def test_compare_nested_names_the_place() -> None:
    with pytest.raises(ParityError, match="output 'logits.1', rank 0"):
        compare_nested(
            {"logits": [torch.ones(1), torch.zeros(1)], "n": 3},
            {"logits": [torch.ones(1), torch.ones(1)], "n": 3},
            tolerance=Bitwise(),
            where=Where("output", rank=0),
        )


def dtensor_differences() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(8.0)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    others = [full, distribute_tensor(full, mesh, [Replicate()]), distribute_tensor(full + 1, mesh, [Shard(0)])]
    messages = []
    compare_tensors(sharded, sharded.clone(), tolerance=Bitwise(), where=HERE)
    for other in others:
        try:
            compare_tensors(sharded, other, tolerance=Bitwise(), where=HERE)
        except ParityError as error:
            messages.append(str(error))
    return messages


def test_compare_tensors_of_dtensors(two_ranks: WorkerPool) -> None:
    for kind, placements, values in two_ranks.run(dtensor_differences):
        assert "got a DTensor, want a Tensor" in kind
        assert "placements: got (Shard(dim=0),), want (Replicate(),)" in placements
        assert "(this rank's shard), step 2, rank 0: 4 of 4 elements differ" in values


# --- mutants on graphs of their own


def collective_graph(kind: str, operator: str = "avg") -> fx.GraphModule:
    """x -> wait(launch(x)) for the default group."""
    c10d, graph = torch.ops._c10d_functional, fx.Graph()
    x = graph.placeholder("x")
    if kind == "all_gather":
        launched = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
    elif kind == "reduce_scatter":
        launched = graph.call_function(c10d.reduce_scatter_tensor.default, (x, operator, 2, "0"))
    else:
        launched = graph.call_function(c10d.all_reduce.default, (x, operator, "0"))
    graph.output(graph.call_function(c10d.wait_tensor.default, (launched,)))
    return fx.GraphModule(nn.Module(), graph)


def run_mutated(kind: str, operator: str, mutant: str, calls: list[list[float]]) -> list[list[float]]:
    """Results of each call, whose input is scaled by rank + 1."""
    rank = torch.distributed.get_rank()
    gm = collective_graph(kind, operator)
    assert getattr(mutants, mutant)(gm) == 1
    return [gm(torch.tensor(values) * (rank + 1)).tolist() for values in calls]


@pytest.mark.parametrize(
    ("kind", "operator", "mutant", "calls", "want"),
    [
        ("reduce_scatter", "avg", "drop_reductions", [[1.0, 3.0]], [[[1.0]], [[6.0]]]),
        ("all_reduce", "avg", "drop_reductions", [[1.0, 3.0]], [[[1.0, 3.0]], [[2.0, 6.0]]]),
        ("reduce_scatter", "avg", "swap_average_and_sum", [[1.0, 3.0]], [[[3.0]], [[9.0]]]),
        ("all_reduce", "sum", "swap_average_and_sum", [[2.0]], [[[3.0]], [[3.0]]]),
        ("all_gather", "", "stale_gathers", [[1.0], [5.0]], [[[1.0, 2.0], [1.0, 2.0]]] * 2),
    ],
)
def test_mutant_edits_do_what_they_say(
    two_ranks: WorkerPool, kind: str, operator: str, mutant: str, calls: Any, want: Any
) -> None:
    assert two_ranks.run(run_mutated, kind, operator, mutant, calls) == want


# --- parity


def net_parity(backend: str, options: dict[str, Any]) -> tuple[list[float], list[dict[str, int]], int]:
    result = check_parity(Net, net_inputs, init_device_mesh("cpu", (2,)), backend=backend, **options)
    return result.losses, result.launches, result.max_ulp


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parity_of_a_healthy_engine(two_ranks: WorkerPool, microbatches: int) -> None:
    options = {"microbatches": microbatches, "expect_collectives": "at_most"}
    (losses, launches, max_ulp), (other_losses, *_) = two_ranks.run(net_parity, "aot_eager", options)
    assert len(losses) == 3
    assert losses != other_losses
    assert max_ulp == 0
    assert launches[0]["reduce_scatter"] == 3


def test_parity_of_inference(two_ranks: WorkerPool) -> None:
    for _, launches, _ in two_ranks.run(net_parity, "aot_eager", {"train": False}):
        assert launches[0] == {"all_gather": 3, "reduce_scatter": 0, "all_reduce": 0}


def parity_error(fault: str | None, options: dict[str, Any]) -> tuple[str, int]:
    """Message of the ParityError that a broken engine leads to, and how many nodes the fault changed."""
    context: AbstractContextManager[mutants.Edited] = getattr(mutants, fault)()
    with context as edited, pytest.raises(ParityError) as raised:
        check_parity(Net, net_inputs, init_device_mesh("cpu", (2,)), **options)
    return str(raised.value), edited.count


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("dropped_reduction", {}, r"gradient .*, step 0, rank \d"),
        ("wrong_divide_factor", {}, r"gradient .*, step 0, rank \d"),
        ("stale_gather", {}, r"output '0', step 1, rank \d"),
        ("lost_accumulation", {"microbatches": 2}, r"gradient .*, step 0, rank \d"),
    ],
)
def test_parity_fails_on_mutant(two_ranks: WorkerPool, fault: str, options: dict[str, Any], message: str) -> None:
    for told, edited in two_ranks.run(parity_error, fault, options):
        assert re.match(message, told), told
        assert edited > 0


def annotate_only(model: nn.Module, mesh: Any) -> None:
    fully_shard(model, mesh=mesh)


def frozen_net() -> nn.Module:
    return Net().requires_grad_(False)


def no_inputs_move(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def outcome(options: dict[str, Any]) -> str:
    try:
        check_parity(Net, net_inputs, init_device_mesh("cpu", (2,)), **options)
    except ParityError as error:
        return str(error)
    return "agreed"


def test_parity_fails_when_no_parameter_moves(two_ranks: WorkerPool) -> None:
    for told in two_ranks.run(outcome, {"optimizer": no_inputs_move}):
        assert "no parameter moved" in told
