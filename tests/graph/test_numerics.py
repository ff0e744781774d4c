"""Lowered graphs compute what their markers mean: all ranks in lockstep against plain arithmetic, bit for bit."""

from __future__ import annotations

import operator
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphshard import driver
from graphshard.ir import launches
from graphshard.markers import reduce_ops
from tests.graph.graphs import (
    BATCH,
    BF16,
    CLASSES,
    F16,
    F32,
    WIDTH,
    GraphBuilder,
    Weight,
    toy_backward,
    toy_forward,
    toy_weights,
    trace,
)
from tests.graph.lockstep import run_ranks

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)

DTYPES = st.sampled_from(
    [
        (F32, F32, F32),
        (F32, BF16, F32),
        (F32, BF16, BF16),
        (F32, F16, F16),
        (BF16, BF16, F32),
        (F32, F32, torch.float64),
    ]
)


@st.composite
def weights(draw: st.DrawFn) -> list[Weight]:
    """Up to four parameters of one or two units, of any shape, on 1 to 5 ranks."""
    world_size = draw(st.integers(1, 5))
    dtype, param_dtype, reduce_dtype = draw(DTYPES)
    sizes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4))
    units = draw(st.lists(st.sampled_from(["first.", "second.", ""]), min_size=len(sizes), max_size=len(sizes)))
    return [
        Weight(f"{unit}p{i}", tuple(size), i, world_size, dtype, param_dtype, reduce_dtype, draw(st.booleans()))
        for i, (unit, size) in enumerate(zip(units, sizes, strict=True))
    ]


def random(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reduced_shards(grads: list[Tensor], weight: Weight) -> list[Tensor]:
    """What reducing the gradients of all ranks means: the shard of each rank."""
    ops = reduce_ops(weight.spec.reduce_dtype, weight.world_size)
    terms = [grad.to(weight.spec.reduce_dtype) / (ops.predivide or 1) for grad in grads]
    total = reduce(operator.add, terms)
    total = total / len(grads) if ops.op == "avg" else total / (ops.postdivide or 1)
    return weight.shards(total.to(weight.dtype))


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.is_contiguous()


@EXAMPLES
@given(weights())
def test_gathers_yield_the_parameter_in_its_param_dtype(params: list[Weight]) -> None:
    build = GraphBuilder()
    marked = build.finish(*(build.unshard(weight) for weight in params))
    lowered = driver.lower(marked.gm, marked.ctx, "gathers").gm
    full = [random(weight.size, weight.dtype, i) for i, weight in enumerate(params)]
    shards = [weight.shards(value) for weight, value in zip(params, full, strict=True)]
    for results in run_ranks(lowered, list(zip(*shards, strict=True))):
        for weight, value, result in zip(params, full, results, strict=True):
            assert_same(result, value.to(weight.spec.dtype))
    assert len(launches(lowered.graph)) == (0 if params[0].world_size == 1 else len(_buckets(params)))


def _buckets(params: list[Weight]) -> set[tuple[str, bool]]:
    return {(weight.ref.unit, weight.reshard) for weight in params}


@EXAMPLES
@given(weights(), st.sampled_from(["plain", "held", "transposed"]))
def test_reductions_yield_the_average_in_the_parameters_dtype(params: list[Weight], case: str) -> None:
    build = GraphBuilder("backward")
    for weight in params:
        build.shard(weight)
    tangents = [
        build.input(f"tangents_{i}", weight.size[::-1] if case == "transposed" else weight.size, weight.spec.dtype)
        for i, weight in enumerate(params)
    ]
    flip = torch.ops.aten.permute.default
    grads = [
        build.call(flip, tangent, list(reversed(range(len(weight.size))))) if case == "transposed" else tangent
        for tangent, weight in zip(tangents, params, strict=True)
    ]
    marked = build.finish(*(build.reduce(grad, weight) for grad, weight in zip(grads, params, strict=True)))
    if case == "held":
        marked = marked.flagged(held=tuple(weight.shard_name for weight in params))
    lowered = driver.lower(marked.gm, marked.ctx, "reductions").gm

    ranks = range(params[0].world_size)
    grads_by_rank = [[random(w.size, w.spec.dtype, 10 * rank + i) for i, w in enumerate(params)] for rank in ranks]
    held_by_rank = [
        [random(w.size, w.spec.reduce_dtype, 99 * rank + i) for i, w in enumerate(params)] for rank in ranks
    ]
    shards = [torch.zeros(weight.shard_numel, dtype=weight.dtype) for weight in params]
    args = [
        [
            *shards,
            *(
                grad.permute(*reversed(range(grad.dim()))).contiguous() if case == "transposed" else grad
                for grad in grads_
            ),
            *(held if case == "held" else []),
        ]
        for grads_, held in zip(grads_by_rank, held_by_rank, strict=True)
    ]
    results = run_ranks(lowered, args)
    for i, weight in enumerate(params):
        grads_of = [grads_by_rank[rank][i] for rank in ranks]
        if case == "held":
            grads_of = [held_by_rank[rank][i] + grad for rank, grad in zip(ranks, grads_of, strict=True)]
        for rank, want in enumerate(reduced_shards(grads_of, weight)):
            assert_same(results[rank][i], want)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("disabled", ["", "assign_buckets", "order_launches", "assign_buckets,order_launches"])
def test_toy_has_the_gradients_of_autograd(world_size: int, disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
    weights = toy_weights(world_size=world_size)
    full = [random(weight.size, F32, i).requires_grad_() for i, weight in enumerate(weights)]
    shards = list(
        zip(*(weight.shards(value.detach()) for weight, value in zip(weights, full, strict=True)), strict=True)
    )
    inputs = [random((BATCH, WIDTH), F32, 50 + rank) for rank in range(world_size)]
    tangents = [random((BATCH, CLASSES), F32, 70 + rank) for rank in range(world_size)]

    forward, backward = toy_forward(weights), toy_backward(weights)
    run_forward = driver.lower(forward.gm, forward.ctx, "forward").gm
    run_backward = driver.lower(backward.gm, backward.ctx, "backward").gm
    outputs = run_ranks(run_forward, [[x, *mine] for x, mine in zip(inputs, shards, strict=True)])
    grads = run_ranks(
        run_backward,
        [[*mine, *saved, tangent] for mine, (_, *saved), tangent in zip(shards, outputs, tangents, strict=True)],
    )

    scores = [toy(full, x) for x in inputs]
    for out, score in zip(outputs, scores, strict=True):
        torch.testing.assert_close(out[0], score.detach(), rtol=0, atol=0)
    wanted = torch.autograd.grad(scores, full, [tangent / world_size for tangent in tangents])
    for i, (weight, want) in enumerate(zip(weights, wanted, strict=True)):
        for rank, part in enumerate(weight.shards(want)):
            torch.testing.assert_close(grads[rank][i], part)


def toy(full: list[Tensor], x: Tensor) -> Tensor:
    for weight, bias in zip(full[:-1:2], full[1:-1:2], strict=True):
        x = torch.relu(torch.addmm(bias, x, weight.t()))
    return x @ full[-1].t()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_traced_model_with_tied_weights_has_the_gradients_of_autograd(world_size: int) -> None:
    weights = [
        Weight("embedding", (7, 4), world_size=world_size),
        Weight("block.weight", (4, 4), world_size=world_size),
    ]

    def model(read, ids, x):  # type: ignore[no-untyped-def]
        hidden = torch.nn.functional.embedding(ids, read(0)) + x
        hidden = hidden + torch.tanh(hidden @ read(1))
        return hidden @ read(0).t()

    traced = trace(model, weights, [torch.tensor([0, 5, 6]), torch.zeros(3, 4)], driver.run_joint_passes)
    lowered = [driver.lower(part.gm, part.ctx, "traced").gm for part in (traced.forward, traced.backward)]
    full = [random(weight.size, F32, i).requires_grad_() for i, weight in enumerate(weights)]
    shards = list(
        zip(*(weight.shards(value.detach()) for weight, value in zip(weights, full, strict=True)), strict=True)
    )
    batches = [(torch.tensor([rank, 5, 6]), random((3, 4), F32, 30 + rank)) for rank in range(world_size)]
    tangents = [random((3, 7), F32, 60 + rank) for rank in range(world_size)]

    outputs = run_ranks(lowered[0], [[*mine, *batch] for mine, batch in zip(shards, batches, strict=True)])
    saved = [out[traced.num_results :] for out in outputs]
    grads = run_ranks(lowered[1], [[*kept, tangent] for kept, tangent in zip(saved, tangents, strict=True)])

    wanted = torch.autograd.grad(
        [model(full.__getitem__, *batch) for batch in batches], full, [tangent / world_size for tangent in tangents]
    )
    for i, (weight, want) in enumerate(zip(weights, wanted, strict=True)):
        for rank, part in enumerate(weight.shards(want)):
            torch.testing.assert_close(grads[rank][i], part)
