"""Lowered graphs compute what their markers mean: all ranks in lockstep against plain arithmetic, bit for bit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings
from graphshard.graph.ir import aten, launches
from graphshard.graph.markers import reduce_ops
from graphshard.lowering import driver
from tests.graph.graphs import (
    BATCH,
    BF16,
    CLASSES,
    F16,
    F32,
    WIDTH,
    GraphBuilder,
    Marked,
    Weight,
    toy_backward,
    toy_forward,
    toy_weights,
    trace,
)
from tests.graph.lockstep import Groups, mesh_groups, run_ranks

EXAMPLES = settings(max_examples=40)

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
def weights(draw: st.DrawFn, mixed: bool = False) -> list[Weight]:
    """Up to four parameters of one or two units, of any shape and shard dim, on a mesh of up to 3 x 4 ranks.

    Args:
        draw: of Hypothesis.
        mixed: whether their dtypes may differ.
    """
    world_size, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4))
    units = draw(st.lists(st.sampled_from(["first.", "second.", ""]), min_size=len(sizes), max_size=len(sizes)))
    dtypes = draw(DTYPES)
    found = []
    for i, (unit, size) in enumerate(zip(units, sizes, strict=True)):
        dim = draw(st.integers(0, len(size) - 1))
        if dim:
            size[dim] *= world_size  # as FSDP2 demands
        dtypes = draw(DTYPES) if mixed else dtypes
        found.append(Weight(f"{unit}p{i}", tuple(size), i, world_size, *dtypes, dim=dim, replicas=replicas))
    return found


SETTINGS = st.builds(
    UnitSettings, divide_factor=st.sampled_from([None, None, 1.0, 2.0, 3.0, 12.0]), force_sum=st.booleans()
)


def random(size: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def groups_of(weight: Weight) -> Groups:
    return mesh_groups(weight.replicas, weight.world_size)


def shards_by_rank(params: Sequence[Weight], full: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """The shards that each rank has."""
    shards = [weight.shards(value) for weight, value in zip(params, full, strict=True)]
    return list(zip(*shards, strict=True)) * params[0].replicas


def reduced_shards(
    grads: list[Tensor],
    weight: Weight,
    settings: UnitSettings = DEFAULT_SETTINGS,
    partials: list[Tensor] | None = None,
) -> list[Tensor]:
    """What reducing the gradients of all ranks means: the shard of each rank."""
    spec, count = weight.spec, weight.world_size
    ops = reduce_ops(spec.reduce_dtype, count, weight.replicas, settings.divide_factor, settings.force_sum)
    terms = [grad.to(spec.reduce_dtype) / (ops.predivide or 1) * (ops.premultiply or 1) for grad in grads]
    totals = [reduce(operator.add, terms[i : i + count]) for i in range(0, len(terms), count)]
    if count > 1 and ops.scatter == "avg":
        totals = [total / count for total in totals]
    shards = [shard for total in totals for shard in weight.shards(total)]
    if partials is not None:
        shards = [shard + partial for shard, partial in zip(shards, partials, strict=True)]
    if weight.replicas > 1:
        if not settings.all_reduce:
            return shards
        sums = [reduce(operator.add, shards[i::count]) for i in range(count)]
        shards = [total / weight.replicas if ops.reduce == "avg" else total for total in sums] * weight.replicas
    return [(shard / (ops.postdivide or 1)).to(weight.dtype) for shard in shards]


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.is_contiguous()


@EXAMPLES
@given(weights(mixed=True))
def test_gathers_yield_the_parameter_in_its_param_dtype(params: list[Weight]) -> None:
    build = GraphBuilder()
    marked = build.finish(*(build.unshard(weight) for weight in params))
    lowered = driver.lower(marked.gm, marked.ctx, "gathers").gm
    full = [random(weight.size, weight.dtype, i) for i, weight in enumerate(params)]
    for results in run_ranks(lowered, shards_by_rank(params, full), groups_of(params[0])):
        for weight, value, result in zip(params, full, results, strict=True):
            assert_same(result, value.to(weight.spec.dtype))
    units = {weight.ref.unit for weight in params}
    assert len(launches(lowered.graph)) == (0 if params[0].world_size == 1 else len(units))


@dataclass
class Reductions:
    """A lowered graph that reduces a gradient for each weight, and what every rank has for it.

    Attributes:
        grads, added, partials: of each rank, of each weight.
    """

    params: list[Weight]
    unit_settings: UnitSettings
    case: str

    def __post_init__(self) -> None:
        ranks = range(self.params[0].world_size * self.params[0].replicas)
        self.grads = [[random(w.size, w.spec.dtype, 10 * r + i) for i, w in enumerate(self.params)] for r in ranks]
        self.added = [
            [random(w.size, w.spec.reduce_dtype, 99 * r + i) for i, w in enumerate(self.params)] for r in ranks
        ]
        self.partials = [
            [random([w.shard_numel], w.spec.reduce_dtype, 77 * r + i) for i, w in enumerate(self.params)] for r in ranks
        ]

    def marked(self) -> Marked:
        build = GraphBuilder("backward")
        for weight in self.params:
            build.shard(weight)
        flips = self.case == "transposed"
        tangents = [
            build.input(f"tangents_{i}", weight.size[::-1] if flips else weight.size, weight.spec.dtype)
            for i, weight in enumerate(self.params)
        ]
        grads = [
            build.call(aten.permute.default, tangent, list(reversed(range(len(weight.size))))) if flips else tangent
            for tangent, weight in zip(tangents, self.params, strict=True)
        ]
        marked = build.finish(*(build.reduce(grad, weight) for grad, weight in zip(grads, self.params, strict=True)))
        names = [weight.shard_name for weight in self.params]
        return marked.flagged(
            added=tuple((w.shard_name, w.spec.reduce_dtype) for w in self.params) if self.case == "added" else (),
            partial=tuple(names) if self.case == "partial" else (),
            units=tuple((unit, self.unit_settings) for unit in sorted({w.ref.unit for w in self.params})),
        )

    def args(self) -> list[list[Tensor]]:
        shards = [torch.zeros(weight.shard_numel, dtype=weight.dtype) for weight in self.params]
        extra = {"added": self.added, "partial": self.partials}.get(self.case, [[] for _ in self.grads])
        given = [
            [grad.permute(*reversed(range(grad.dim()))).contiguous() for grad in grads]
            if self.case == "transposed"
            else grads
            for grads in self.grads
        ]
        return [[*shards, *grads, *more] for grads, more in zip(given, extra, strict=True)]

    def check(self) -> None:
        marked = self.marked()
        lowered = driver.lower(marked.gm, marked.ctx, "reductions").gm
        results = run_ranks(lowered, self.args(), groups_of(self.params[0]))
        for i, weight in enumerate(self.params):
            grads = [mine[i] for mine in self.grads]
            if self.case == "added":
                grads = [mine[i] + grad for mine, grad in zip(self.added, grads, strict=True)]
            partials = [mine[i] for mine in self.partials] if self.case == "partial" else None
            wanted = reduced_shards(grads, weight, self.unit_settings, partials)
            for mine, want in zip(results, wanted, strict=True):
                assert_same(mine[i], want)


@EXAMPLES
@given(weights(), st.sampled_from(["plain", "added", "transposed"]))
def test_reductions_yield_the_average_in_the_parameters_dtype(params: list[Weight], case: str) -> None:
    Reductions(params, DEFAULT_SETTINGS, case).check()


@EXAMPLES
@given(weights(), SETTINGS)
def test_reductions_divide_as_the_unit_says(params: list[Weight], unit_settings: UnitSettings) -> None:
    Reductions(params, unit_settings, "plain").check()


@EXAMPLES
@given(weights().filter(lambda params: params[0].replicas > 1), st.booleans(), st.sampled_from(["plain", "partial"]))
def test_reductions_over_copies_wait_for_the_last_backward(params: list[Weight], all_reduce: bool, case: str) -> None:
    Reductions(params, UnitSettings(all_reduce=all_reduce), case).check()


def test_reductions_add_what_is_partial_of_some_members_only() -> None:
    params = [Weight(f"p{i}", (3, 2), i, replicas=2) for i in range(3)]
    reductions = Reductions(params, DEFAULT_SETTINGS, "plain")
    marked = reductions.marked().flagged(partial=("p1_shard",))
    args = [[*mine, partials[1]] for mine, partials in zip(reductions.args(), reductions.partials, strict=True)]
    results = run_ranks(driver.lower(marked.gm, marked.ctx, "some").gm, args, groups_of(params[0]))
    for i, weight in enumerate(params):
        partials = [mine[1] for mine in reductions.partials] if i == 1 else None
        wanted = reduced_shards([mine[i] for mine in reductions.grads], weight, DEFAULT_SETTINGS, partials)
        for mine, want in zip(results, wanted, strict=True):
            assert_same(mine[i], want)


@pytest.mark.parametrize(("replicas", "world_size"), [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("disabled", ["", "assign_buckets", "order_launches", "assign_buckets,order_launches"])
def test_toy_has_the_gradients_of_autograd(
    replicas: int, world_size: int, disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSHARD_DISABLE", disabled)
    weights = toy_weights(world_size=world_size, replicas=replicas)
    groups, ranks = mesh_groups(replicas, world_size), range(replicas * world_size)
    full = [random(weight.size, F32, i).requires_grad_() for i, weight in enumerate(weights)]
    shards = shards_by_rank(weights, [value.detach() for value in full])
    inputs = [random((BATCH, WIDTH), F32, 50 + rank) for rank in ranks]
    tangents = [random((BATCH, CLASSES), F32, 70 + rank) for rank in ranks]

    forward, backward = toy_forward(weights), toy_backward(weights)
    run_forward = driver.lower(forward.gm, forward.ctx, "forward").gm
    run_backward = driver.lower(backward.gm, backward.ctx, "backward").gm
    outputs = run_ranks(run_forward, [[x, *mine] for x, mine in zip(inputs, shards, strict=True)], groups)
    grads = run_ranks(
        run_backward,
        [[*mine, *saved, tangent] for mine, (_, *saved), tangent in zip(shards, outputs, tangents, strict=True)],
        groups,
    )

    scores = [toy(full, x) for x in inputs]
    for out, score in zip(outputs, scores, strict=True):
        torch.testing.assert_close(out[0], score.detach(), rtol=0, atol=0)
    wanted = torch.autograd.grad(scores, full, [tangent / len(ranks) for tangent in tangents])
    for mine, want in zip(grads, shards_by_rank(weights, wanted), strict=True):
        torch.testing.assert_close(mine, list(want))


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
    shards = shards_by_rank(weights, [value.detach() for value in full])
    batches = [(torch.tensor([rank, 5, 6]), random((3, 4), F32, 30 + rank)) for rank in range(world_size)]
    tangents = [random((3, 7), F32, 60 + rank) for rank in range(world_size)]

    outputs = run_ranks(lowered[0], [[*mine, *batch] for mine, batch in zip(shards, batches, strict=True)])
    saved = [out[traced.num_results :] for out in outputs]
    grads = run_ranks(lowered[1], [[*kept, tangent] for kept, tangent in zip(saved, tangents, strict=True)])

    wanted = torch.autograd.grad(
        [model(full.__getitem__, *batch) for batch in batches], full, [tangent / world_size for tangent in tangents]
    )
    for mine, want in zip(grads, shards_by_rank(weights, wanted), strict=True):
        torch.testing.assert_close(mine[: len(weights)], list(want))
