"""Comparisons that see the last bit, and say where it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from graphshard.testing import (
    Bitwise,
    ParityError,
    Tolerance,
    Ulps,
    Where,
    WorkerPool,
    compare_named,
    compare_nested,
    compare_tensors,
    ulp_distance,
)

FAR = torch.iinfo(torch.int64).max
HERE = Where("gradient", step=2, rank=0)


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
    with pytest.raises(ParityError, match=r"output 'logits\.1', rank 0"):
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
