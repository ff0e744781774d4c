"""Several regions in one step: the recorded order, gathers one region ahead, reductions behind, nothing left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import Bitwise, TrainingRun, Ulps, WorkerPool, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
LAYERS = 3


class Stages(nn.Module):
    """A graph break in the loop over blocks: each is a region, and all of them share its programs."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(models.DecoderBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == 2:
                torch._dynamo.graph_break()
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Skipping(models.Decoder):
    """Leaves a layer out, or runs them backwards, when told to."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i in self.order:
            h = self.layers[i](h)
        logits: Tensor = self.head(self.norm(h))
        return logits


class UnitsSharingWeights(nn.Module):
    """Blocks that share a weight, and one block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Mlp() for _ in range(3))
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 2, 1):
            x = self.layers[i](x)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor]]]] = {
    "decoder": (lambda: models.Decoder(LAYERS), models.tokens),
    "tied": (models.tied_decoder, models.tokens),
    "shared": (UnitsSharingWeights, models.features),
    "break in each block": (models.Broken, models.features),
    "break between blocks": (Stages, models.sequences),
    "checkpointed": (models.Checkpointed, models.tokens),
    "checkpointed, with a break": (lambda: Stages(checkpointed=True), models.sequences),
    "adapters": (models.LowRank, models.features),
    "partly frozen": (models.PartlyFrozen, models.features),
    "outputs without a gradient": (models.TwoHeads, models.features),
}


def regions_of(run: TrainingRun, regions: str, plan: str = "auto") -> dict[str, Any]:
    return {} if run.is_reference else {"regions": regions, "plan": plan}


def loss_of(model: nn.Module, x: tuple[Tensor]) -> Tensor:
    found: Any = model(*x)
    out: Tensor = found["main"] if isinstance(found, dict) else found
    return out.float().square().mean()


def gathered(model: nn.Module) -> list[str]:
    """FQNs of the parameters that are gathered, on their way, or that hold an unreduced gradient."""
    engine: Any = model.__dict__["_graphshard_engine"]
    holdings = engine.holdings
    assert not holdings.gathers._under_way and not holdings.reductions._under_way
    return [shard.fqn for shard in engine.shards if shard.bits]


def train(
    run: TrainingRun,
    model: Any,
    inputs: Callable[[int, int], tuple[Tensor]],
    *,
    microbatches: int = 1,
    counts: bool = False,
) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for index in range(4):
        with run.counted(f"step {index}") if index and counts else nullcontext():
            for microbatch in range(microbatches):
                model.set_requires_gradient_sync(microbatch == microbatches - 1)
                loss = loss_of(model, inputs(microbatches * index + microbatch, run.rank))
                loss.backward()
                run.note(f"loss {index}, {microbatch}", loss)
        run.observe(loss, model)
        if not run.is_reference and microbatches == 1:
            assert gathered(model) == []
        optimizer.step()
        optimizer.zero_grad()


# Without a break the whole model is one region, in which there is no order to follow.
IN_SEVERAL_REGIONS = [(name, "model" if "break" in name else "unit") for name in MODELS]


@pytest.mark.parametrize("plan", ["fsdp2", "auto"])
@pytest.mark.parametrize(("name", "regions"), IN_SEVERAL_REGIONS)
@training_test(tolerance=BITWISE)
def test_order_that_is_followed_changes_no_bit(run: TrainingRun, name: str, regions: str, plan: str) -> None:
    build, inputs = MODELS[name]
    model = run.shard(build(), **regions_of(run, regions, plan))
    train(run, model, inputs, counts=plan == "fsdp2")


@training_test(
    backends=("inductor",), tolerance=Ulps(64, "Inductor fuses and reorders float operations", atol=2e-6), timeout_s=280
)
def test_order_that_is_followed_under_inductor(run: TrainingRun) -> None:
    build, inputs = MODELS["break between blocks"]
    train(run, run.shard(build()), inputs)


@pytest.mark.parametrize(
    ("name", "regions"), [("decoder", "unit"), ("break in each block", "model"), ("break between blocks", "model")]
)
@training_test(tolerance=BITWISE)
def test_microbatches_accumulate_across_regions(run: TrainingRun, name: str, regions: str) -> None:
    build, inputs = MODELS[name]
    model = run.shard(build(), **regions_of(run, regions))
    train(run, model, inputs, microbatches=3)
    if not run.is_reference:  # though the first backwards reduce nothing
        assert any("reduced in" in note for note in graphshard.report(model).notes)


@pytest.mark.skipif(
    not models.ROUNDS_GRADIENTS, reason="torch 2.15 reduces some gradients without rounding them to param_dtype"
)
@pytest.mark.parametrize(("name", "reshard"), [("decoder", False), ("break between blocks", True)])
@training_test(tolerance=BITWISE)
def test_policies_of_units_across_regions(run: TrainingRun, name: str, reshard: bool) -> None:
    build, inputs = MODELS[name]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = regions_of(run, "unit" if name == "decoder" else "model")
    train(run, run.shard(build(), reshard_after_forward=reshard, mp_policy=policy, **options), inputs)


@pytest.mark.parametrize("sync", ["each", "last"])
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_hybrid_units_across_regions(run: TrainingRun, sync: str) -> None:
    model: Any = run.shard(models.mlps(), **regions_of(run, "unit"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(3):
        for microbatch in range(2):
            model.set_requires_all_reduce(sync == "each" or microbatch == 1)
            loss = loss_of(model, models.features(2 * index + microbatch, run.rank))
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@training_test(tolerance=BITWISE)
def test_replicated_units_across_regions(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(LAYERS), strategy="replicate", **regions_of(run, "unit"))
    train(run, model, models.tokens)


@training_test(tolerance=BITWISE)
def test_evaluations_between_steps_have_orders_of_their_own(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(LAYERS), **regions_of(run, "unit"))
    for index in range(4):
        loss = loss_of(model, models.tokens(index, run.rank))
        loss.backward()
        with torch.no_grad():
            outputs = [model(*models.tokens(50 + i, run.rank)) for i in range(2)]
            outputs.append(model.layers[1](*models.sequences(index, run.rank)))
        run.observe(loss, model, outputs=outputs)
        model.zero_grad()
    if not run.is_reference:
        assert not [note for note in graphshard.report(model).notes if "was known to follow" in note]


@training_test(tolerance=BITWISE)
def test_two_forwards_before_one_backward(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(LAYERS), **regions_of(run, "unit"))
    for index in range(3):
        loss = loss_of(model, models.tokens(2 * index, run.rank)) + loss_of(
            model, models.tokens(2 * index + 1, run.rank)
        )
        loss.backward()
        run.observe(loss, model)
        if not run.is_reference:
            assert gathered(model) == []
        model.zero_grad()


@training_test(tolerance=BITWISE)
def test_pass_that_leaves_its_order_is_right_and_noted(run: TrainingRun) -> None:
    model = run.shard(Skipping(LAYERS), **regions_of(run, "unit"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, order in enumerate([(0, 1, 2), (0, 1, 2), (0, 2), (0, 1, 2), (2, 1, 0), (0, 2), (0, 0, 1)]):
        model.order = order
        loss = loss_of(model, models.tokens(index, run.rank))
        loss.backward()
        run.observe(loss, model)
        if not run.is_reference:
            assert gathered(model) == []
        optimizer.step()
        optimizer.zero_grad()
    if not run.is_reference:
        notes = [note for note in graphshard.report(model).notes if "was known to follow" in note]
        assert notes[0] == (
            "forward of 'root' with gradients: ran forward of layers.2 where forward of layers.1 was known to follow: "
            "nothing is gathered ahead behind it"
        )
        kinds = [note.partition(": ran ")[0] for note in notes]  # each said once
        assert sorted(kinds) == ["backward of 'root'", "forward of 'root' with gradients"]


class Writing(models.Decoder):
    """Writes a parameter of a later layer between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 1:
                with torch.no_grad():
                    dict(self.layers[2].named_parameters())["up.bias"].add_(1)
        logits: Tensor = self.head(self.norm(h))
        return logits


@training_test(tolerance=BITWISE)
def test_parameter_written_between_regions_is_gathered_as_it_is(run: TrainingRun) -> None:
    model = run.shard(Writing(LAYERS), **regions_of(run, "unit"))
    for index in range(3):
        loss = loss_of(model, models.tokens(index, run.rank))
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()


# -- when things happen


_EVENTS = {
    r"c10d::_?all_?gather": "gather",
    r"c10d::_?reduce_?scatter": "reduce",
    r"_c10d_functional::wait_tensor": "wait",
    r"aten::(mm|addmm|bmm|embedding|embedding_dense_backward)$": "compute",
}


@contextmanager
def traced(model: nn.Module) -> Iterator[list[str]]:
    """What happened inside, in order; successive computations are one."""
    seen: list[str] = []
    engine: Any = model.__dict__["_graphshard_engine"]
    with profile(use_kineto=False) as profiler:
        yield seen
        engine.holdings.gathers.settle()  # see `count_launches`
    for event in sorted(profiler.function_events or (), key=lambda event: event.time_range.start):
        name = next((name for pattern, name in _EVENTS.items() if re.match(pattern, event.name)), None)
        if name is not None and (name != "compute" or seen[-1:] != ["compute"]):
            seen.append(name)


def passes_of(build: Callable[[], nn.Module], x: tuple[Tensor], regions: str) -> tuple[list[str], list[str]]:
    """Events of the forward and of the backward of the third step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = graphshard.compile(build(), mesh, backend="aot_eager", regions=regions, plan="fsdp2")
    for _ in range(2):
        loss_of(model, x).backward()
    with traced(model) as forward:
        loss = loss_of(model, x)
    with traced(model) as backward:
        loss.backward()
    return forward, backward


def order_per_unit() -> None:
    forward, backward = passes_of(lambda: models.Decoder(LAYERS), models.tokens(0, 0), "unit")
    ahead = "gather compute wait"
    # The root is gathered for the embedding, which gathers for the first layer, and so on.
    assert " ".join(forward) == f"gather wait {ahead} {ahead} {ahead} compute"
    assert " ".join(backward) == (
        f"{ahead} "  # the head gathers for the last layer
        "gather compute reduce wait "  # which gathers for the one before it
        "gather compute wait reduce wait "  # what was reduced before is awaited behind the computation
        "compute wait reduce "
        "compute wait reduce wait"  # of the embedding; the root is reduced behind it
    )


def order_between_breaks() -> None:
    _, backward = passes_of(Stages, models.sequences(0, 0), "model")
    assert " ".join(backward) == (
        "gather wait gather compute reduce "  # of the last unit, and ahead
        "wait gather compute wait reduce "  # of the first unit of the region: left to go on behind it
        "wait gather compute wait reduce wait compute wait reduce wait"
    )


@pytest.mark.parametrize("order", [order_per_unit, order_between_breaks])
def test_each_region_gathers_for_the_next_and_reduces_behind(two_ranks: WorkerPool, order: Callable[[], None]) -> None:
    two_ranks.run(order)


def gather_that_nobody_awaits() -> list[str]:
    model = graphshard.compile(models.Decoder(LAYERS), init_device_mesh("cpu", (2,)), backend="aot_eager")
    first: Any = model.layers[0]
    first.unshard()  # lowers the program
    first.reshard()
    with traced(model) as events:
        handle = first.unshard(async_op=True)
    handle.wait()
    assert not any(isinstance(parameter, DTensor) for parameter in first.parameters())
    return events


def test_settled_gather_has_arrived_and_is_still_there_to_take(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(gather_that_nobody_awaits) == [["gather", "wait"]] * 2


# -- choices of users


@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE)
def test_modules_to_prefetch_of_other_regions_are_launched(run: TrainingRun, regions: str) -> None:
    model: Any = run.shard(Stages(), **regions_of(run, regions))
    first, second, third, last = model.layers
    first.set_modules_to_forward_prefetch([third])
    second.set_modules_to_forward_prefetch([third, last])
    last.set_modules_to_backward_prefetch([second, first])
    train(run, model, models.sequences)
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.fallbacks == []
        assert sum("each alone: users have chosen what is prefetched" in note for note in report.notes) == 2


def together(plan: str, memory_budget: int | None) -> tuple[list[Tensor], int, list[str]]:
    """Gradients, gathers of a forward that follows an order, and what the report says of it."""
    torch.manual_seed(0)
    model = graphshard.compile(
        models.Decoder(layers=6), init_device_mesh("cpu", (2,)), backend="aot_eager", regions="unit",
        plan=plan, hardware="h100", memory_budget=memory_budget,
    )  # fmt: skip
    for index in range(3):
        with traced(model) as events:
            loss = loss_of(model, models.tokens(index, torch.distributed.get_rank()))
        loss.backward()
    assert not gathered(model)
    said = [line for line in graphshard.report(model).notes if "collectives" in line]
    return [p.grad.to_local() for p in model.parameters()], events.count("gather"), said  # type: ignore[union-attr]


def test_units_are_gathered_together_as_far_as_the_budget_allows_it(two_ranks: WorkerPool) -> None:
    one_each, tight, roomy = (
        two_ranks.run(together, *options) for options in (("fsdp2", None), ("auto", None), ("auto", 10**9))
    )
    for (grads, gathers, said), (tight_grads, fewer, _), (roomy_grads, fewest, told) in zip(
        one_each, tight, roomy, strict=True
    ):
        assert gathers == 7 and not said
        assert gathers >= fewer > fewest
        assert [line.partition(":")[0] for line in told] == ["forward of 'root' with gradients", "backward of 'root'"]
        assert all(map(torch.equal, grads, tight_grads)) and all(map(torch.equal, grads, roomy_grads))
