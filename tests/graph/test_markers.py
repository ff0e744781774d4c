"""Markers: one string that says all, fake values, gradients, and FSDP2's reduction."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from graphshard.graph.ir import PassContext, shard_placeholder, spec_of
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD, ReduceOps, ShardSpec, padded_shape, reduce_ops
from tests.graph.graphs import BF16, F16, F32, GraphBuilder, Weight

DTYPES = st.sampled_from([F32, F16, BF16, torch.float64, torch.float8_e4m3fn, torch.complex64])
GROUPS = st.text("0123456789abcdef_- :", max_size=8)
SPECS = st.builds(
    ShardSpec,
    size=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5).map(tuple),
    dtype=DTYPES,
    reduce_dtype=DTYPES,
    dim=st.integers(0, 4),
    world_size=st.integers(1, 1 << 20),
    group=GROUPS,
    device=st.sampled_from(["", "cuda", "cpu"]),
)
SPECS = st.one_of(
    SPECS,
    st.builds(replace, SPECS, replicas=st.integers(1, 1 << 20), replicate_group=GROUPS.filter(bool)),
)


@given(SPECS)
def test_spec_survives_its_string(spec: ShardSpec) -> None:
    assert ShardSpec.parse(str(spec)) == spec


@given(SPECS, SPECS)
def test_spec_strings_differ_where_specs_do(one: ShardSpec, other: ShardSpec) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_spec_reads_well() -> None:
    spec = ShardSpec((1024, 256), BF16, F32, 1, 2, "0")
    assert str(spec) == "bfloat16 1024x256|reduce float32|dim 1|2 of 0"
    spec = replace(spec, dim=0, replicas=4, replicate_group="1")
    assert str(spec) == "bfloat16 1024x256|reduce float32|dim 0|2 of 0|4 of 1"
    assert str(replace(spec, device="cuda")) == "bfloat16 1024x256|reduce float32|dim 0|2 of 0|4 of 1|on cuda"


def test_spec_counts_the_ranks_that_gradients_are_averaged_over() -> None:
    assert Weight("w", (4,), world_size=2, replicas=3).spec.ranks == 6


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 2))
def test_padded_shape_is_the_least_that_divides(size: list[int], world_size: int, dim: int) -> None:
    dim = min(dim, len(size) - 1)
    padded = padded_shape(size, world_size, dim)
    assert [*padded[:dim], *padded[dim + 1 :]] == [*size[:dim], *size[dim + 1 :]]
    assert padded[dim] % world_size == 0
    assert size[dim] <= padded[dim] < size[dim] + world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [(5,), (4, 3), (1, 2, 3)])
def test_fakes_have_the_types_that_specs_say(size: tuple[int, ...], world_size: int) -> None:
    weight = Weight("w", size, world_size=world_size, param_dtype=BF16, reduce_dtype=F16)
    with FakeTensorMode():
        shard = torch.empty(weight.shard_numel)
        full = UNSHARD(shard, str(weight.spec))
        grad = REDUCE_GRAD(full, shard, str(weight.spec))
    assert (tuple(full.shape), full.dtype, full.is_contiguous()) == (size, BF16, True)
    assert (grad.shape, grad.dtype, grad.is_contiguous()) == (shard.shape, F32, True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_of_a_gather_is_a_reduction(world_size: int) -> None:
    weight = Weight("w", (4, 3), world_size=world_size, param_dtype=BF16)
    with FakeTensorMode():
        shard = torch.empty(weight.shard_numel, requires_grad=True)
        UNSHARD(shard, str(weight.spec)).sum().backward()
    assert shard.grad is not None
    assert (shard.grad.shape, shard.grad.dtype) == (shard.shape, F32)


def test_markers_of_one_rank_compute_what_they_mean() -> None:
    weight = Weight("w", (4, 3), world_size=1, param_dtype=BF16, reduce_dtype=F32)
    shard = torch.randn(12, requires_grad=True)
    full = UNSHARD(shard, str(weight.spec))
    torch.testing.assert_close(full, shard.detach().view(4, 3).to(BF16))
    grad = torch.randn(4, 3).to(BF16)
    full.backward(grad)
    torch.testing.assert_close(shard.grad, grad.float().flatten())


@pytest.mark.parametrize("param_dtype", [F32, BF16])
def test_markers_of_one_rank_return_fresh_tensors(param_dtype: torch.dtype) -> None:
    weight = Weight("w", (4, 3), world_size=1, param_dtype=param_dtype)
    shard, grad = torch.zeros(12), torch.zeros(4, 3, dtype=param_dtype)
    results = [UNSHARD(shard, str(weight.spec)), REDUCE_GRAD(grad, shard, str(weight.spec))]
    assert len({value.untyped_storage().data_ptr() for value in (shard, grad, *results)}) == 4


# torch 2.15's own opcheck reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_markers_pass_opcheck() -> None:
    weight = Weight("w", (4, 3), world_size=1)
    shard = torch.randn(12, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(UNSHARD, (shard, str(weight.spec)), test_utils=checks)


def test_double_backward_is_refused() -> None:
    weight = Weight("w", (4,), world_size=1)
    shard = torch.ones(4, requires_grad=True)
    full = UNSHARD(shard, str(weight.spec))
    (grad,) = torch.autograd.grad((full**3).sum(), shard, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^graphshard::reduce_grad: .*create_graph=True.*once, as FSDP2's"):
        grad.sum().backward()


def group_of(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


def fsdp2_reduce_ops(
    reduce_dtype: torch.dtype, world_size: int, replicas: int, factor: float | None, force_sum: bool
) -> ReduceOps:
    """What FSDP2 decides, and does where there is one shard only."""
    pre, post, scatter, reduce = _fsdp_collectives._get_gradient_divide_factors(
        group_of(world_size) if world_size > 1 else None,  # type: ignore[arg-type]
        group_of(replicas) if replicas > 1 else None,  # type: ignore[arg-type]
        reduce_dtype,
        factor=factor,
        force_sum_reduction_for_comms=force_sum,
    )
    premultiply = None
    if scatter == ReduceOp.PREMUL_SUM:
        premultiply, scatter = scatter.__getstate__()[1], ReduceOp.SUM  # type: ignore[operator]
    if world_size == 1:  # no reduce-scatter: `foreach_reduce` divides by a factor that was asked for
        premultiply = None
        pre = (pre or 1) * (factor or 1)
    names = (str(op).rpartition(".")[2].lower() for op in (scatter, reduce))
    return ReduceOps(pre or 1, premultiply, *names, post or 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("factor", [None, 1.0, 2.0, 3.0, 4.0, 8.0, 0.5])
@pytest.mark.parametrize("reduce_dtype", [F32, BF16, F16, torch.float64])
def test_reduce_ops_are_those_of_fsdp2(reduce_dtype: torch.dtype, factor: float | None, force_sum: bool) -> None:
    shapes = [(world_size, 1) for world_size in range(1, 130)]
    shapes += [(world_size, replicas) for world_size in range(1, 10) for replicas in range(2, 10)]
    for world_size, replicas in shapes:
        want = fsdp2_reduce_ops(reduce_dtype, world_size, replicas, factor, force_sum)
        ops = reduce_ops(reduce_dtype, world_size, replicas, factor, force_sum)
        ops = ops._replace(predivide=ops.predivide or 1, postdivide=ops.postdivide or 1)
        if world_size == 1:
            want, ops = want._replace(scatter=""), ops._replace(scatter="")
        if replicas == 1:
            want, ops = want._replace(reduce=""), ops._replace(reduce="")
        assert ops == want, (world_size, replicas)


@pytest.mark.parametrize("ranks", range(1, 65))
def test_reduce_ops_average(ranks: int) -> None:
    for world_size in (size for size in range(1, ranks + 1) if ranks % size == 0):
        pre, premultiply, scatter, reduce, post = reduce_ops(F16, world_size, ranks // world_size)
        assert (scatter, reduce, premultiply) == ("sum", "sum", None)
        assert math.isclose((pre or 1) * (post or 1), ranks)


def test_marker_knows_its_shard_through_views() -> None:
    weight = Weight("w", (4,))
    build = GraphBuilder()
    shard = build.shard(weight)
    alias = build.call(torch.ops.aten.alias.default, build.call(torch.ops.aten.view.default, shard, [2]))
    marker = build.call(UNSHARD, alias, str(weight.spec))
    reduction = build.call(REDUCE_GRAD, marker, alias, str(weight.spec))
    build.finish(reduction)
    assert shard_placeholder(marker) is shard_placeholder(reduction) is shard
    assert spec_of(marker) == spec_of(reduction) == weight.spec
    assert PassContext("forward", build.params).params[shard.name].fqn == "w"


def test_marker_of_a_computed_shard_has_no_parameter() -> None:
    weight = Weight("w", (4,))
    build = GraphBuilder()
    marker = build.call(UNSHARD, build.call(torch.ops.aten.neg.default, build.shard(weight)), str(weight.spec))
    with pytest.raises(AssertionError, match="want a placeholder of the graph"):
        shard_placeholder(marker)
