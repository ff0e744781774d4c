"""Calls in any order and any way: blocks alone, other engines, exceptions, checkpoints, meta devices."""

from __future__ import annotations

import copy
from contextvars import copy_context
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def compiled(layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return graphshard.compile(models.Decoder(layers=layers), mesh(), **{"backend": "aot_eager", **options})


def batch() -> tuple[Tensor]:
    return models.tokens(0, torch.distributed.get_rank())


@training_test()
def test_block_alone(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        loss = model(*models.tokens(index, run.rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model.layers[0](*models.sequences(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


class Fragile(nn.Module):
    """Raises in the middle of a forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Broken(layers=2)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.layers[0](x)
        if self.fail:
            raise ArithmeticError("asked for")
        return self.inner.head(self.inner.layers[1](self.inner.embed(x)))


@training_test()
def test_exception_in_forward_then_a_good_step(run: TrainingRun) -> None:
    model = run.shard(Fragile())
    x = models.features(0, run.rank)[0]
    if not run.is_reference:  # eager FSDP2 needs reset_iter_state() after it
        model.fail = True
        with pytest.raises(ArithmeticError):
            model(x)
        model.fail = False
    loss = model(x).square().mean()
    loss.backward()
    run.observe(loss, model)


def same_surface() -> None:
    torch.manual_seed(0)
    plain = models.Decoder(layers=2)
    model = compiled()
    assert isinstance(model, models.Decoder) and isinstance(model.layers[0], models.DecoderBlock)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    model(*batch()).square().mean().backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())
    before = graphshard.report(model).collectives
    assert isinstance(model.head.weight, DTensor)  # a mere attribute read communicates nothing
    assert list(model.state_dict()) == list(plain.state_dict())
    assert graphshard.report(model).collectives == before
    assert "Decoder" in repr(model)


def test_module_looks_as_before(two_ranks: WorkerPool) -> None:
    two_ranks.run(same_surface)


def unshard_by_hand() -> None:
    model = compiled()
    want = model(*batch()).detach()
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    assert model.head.weight.shape == (models.VOCAB, models.DIM)
    assert torch.equal(model(*batch()), want)
    assert not isinstance(model.head.weight, DTensor)  # the root stays gathered until its backward
    model.reshard()
    assert isinstance(model.head.weight, DTensor)


def test_parameters_can_be_unsharded_by_hand(two_ranks: WorkerPool) -> None:
    two_ranks.run(unshard_by_hand)


@pytest.mark.parametrize("assign", [False, True])
@training_test()
def test_state_dict_loaded_between_steps(run: TrainingRun, assign: bool) -> None:
    model = run.shard(models.Decoder(layers=2))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for index in range(3):
        loss = model(*models.tokens(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
        model.load_state_dict({name: value * (1 + index) for name, value in saved.items()}, assign=assign)


@training_test()
def test_meta_device_until_the_first_forward(run: TrainingRun) -> None:
    with torch.device("meta"):
        model = models.Decoder(layers=2)
    model = run.shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    loss = model(*models.tokens(0, run.rank)).square().mean()
    loss.backward()
    run.observe(loss, model)


def left_on_meta() -> None:
    with torch.device("meta"):
        model = models.Decoder(layers=2)
    graphshard.compile(model, mesh(), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"meta device.*embed\.weight"):
        model(*batch())


def test_parameters_left_on_meta_are_named(two_ranks: WorkerPool) -> None:
    two_ranks.run(left_on_meta)


@training_test()
def test_deepcopy_before_compile(run: TrainingRun) -> None:
    original = models.Decoder(layers=2)
    pair = [run.shard(copy.deepcopy(original)), run.shard(original)]
    for index, model in enumerate(pair * 2):
        loss = model(*models.tokens(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)


def regions_of(layers: int, **options: Any) -> tuple[int, dict[str, int]]:
    torch.manual_seed(0)
    build = models.Broken if options.pop("breaks") else models.Decoder
    model = graphshard.compile(build(layers=layers), mesh(), backend="aot_eager", **options)
    x = models.features(0, 0) if build is models.Broken else batch()
    for _ in range(2):
        model(*x).square().mean().backward()
    report = graphshard.report(model)
    return report.regions, dict(report.eager_unshards)


def count_regions() -> None:
    assert regions_of(8, breaks=True) == (4, {})
    assert regions_of(8, breaks=False) == (1, {})
    regions, outside = regions_of(8, breaks=False, regions="unit")
    assert (regions, outside) == (4, {})  # embedding, block, norm, head


def test_equal_blocks_share_regions(two_ranks: WorkerPool) -> None:
    two_ranks.run(count_regions)


class Shapeshifter(nn.Module):
    """Reads its weight in a frame that Dynamo gives up on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.DIM, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)

    @torch.compiler.disable
    def hidden(self, x: Tensor) -> Tensor:
        return x @ self.weight


@training_test(allow_eager=("1.weight", "1 reads parameters outside any graph"))
def test_frame_dynamo_gives_up_on_is_right_and_reported(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(nn.Linear(models.DIM, models.DIM), Shapeshifter()))
    for index in range(2):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.eager_unshards == {"1.weight": 2} == dict(report.eager_reductions)
        assert len(report.fallbacks) == 1


def variables_of_the_context() -> list[int]:
    model = graphshard.compile(models.Broken(layers=2), mesh(), backend="aot_eager")
    counts = []
    for step in range(5):
        model(*models.features(step, 0)).square().mean().backward()
        counts.append(len(copy_context()))
    return counts[2:]


def test_calls_leave_no_more_variables_in_the_threads_context(two_ranks: WorkerPool) -> None:
    for counts in two_ranks.run(variables_of_the_context):
        assert len(set(counts)) == 1, counts


class Interrupted(nn.Module):
    """A call of torch's between two graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        torch._dynamo.graph_break()
        h = torch.nn.functional.silu(h)
        torch._dynamo.graph_break()
        return x + self.down(h)


@training_test()
def test_graph_of_one_call_runs_as_it_is(run: TrainingRun) -> None:
    model = run.shard(nn.Sequential(*(Interrupted() for _ in range(3))))
    for index in range(3):
        loss = model(*models.features(index, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
    if not run.is_reference:
        report = graphshard.report(model)
        assert (report.regions, report.one_calls) == (4, 1)  # two each, for inputs with and without a gradient
        assert "graphs of one call without parameters, which run as they are: 1" in str(report)


def break_in_a_full_graph() -> None:
    model = graphshard.compile(models.Broken(layers=2), mesh(), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(*models.features(0, 0))


def test_fullgraph_gives_dynamos_own_message(two_ranks: WorkerPool) -> None:
    two_ranks.run(break_in_a_full_graph)


def no_recompilation_per_size() -> int:
    model = compiled(dynamic=None)
    for length in range(3, 9):
        x = torch.randint(0, models.VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        model(x).square().mean().backward()
    return graphshard.report(model).regions


def test_symbolic_sizes_do_not_recompile(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(no_recompilation_per_size) == [2, 2]  # the first size, then any


def flags_capture_nothing() -> int:
    model = compiled()
    for sync in (True, False, True, False, False, True):
        model.set_requires_gradient_sync(sync)
        model(*batch()).square().mean().backward()
    return graphshard.report(model).regions


def test_flags_capture_nothing_again(two_ranks: WorkerPool) -> None:
    assert two_ranks.run(flags_capture_nothing) == [1, 1]


def checkpoint_round_trip() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = compiled(), models.Decoder(layers=2)
    for unit in graphshard.find_units(other):
        fully_shard(unit, mesh=mesh())
    fully_shard(other, mesh=mesh())
    model(*batch()).square().mean().backward()
    set_model_state_dict(other, get_model_state_dict(model))
    assert torch.equal(other(*batch()), model(*batch()))


def test_state_goes_over_to_eager_fsdp2(two_ranks: WorkerPool) -> None:
    two_ranks.run(checkpoint_round_trip)


@training_test()
def test_model_inside_a_compiled_function(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    function = loss_of if run.is_reference else torch.compile(loss_of, backend="aot_eager")
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        loss = function(*models.tokens(index, run.rank))
        loss.backward()
        run.observe(loss, model)


@training_test()
def test_inference_mode_between_steps(run: TrainingRun) -> None:
    model = run.shard(models.Decoder(layers=2))
    for index in range(2):
        loss = model(*models.tokens(index, run.rank)).square().mean()
        loss.backward()
        with torch.inference_mode():
            logits = model(*models.tokens(9, run.rank))
        model.reshard()  # the root stays gathered after a forward without a backward
        run.observe(loss, model, outputs=logits.clone())


class Ladder(nn.Module):
    """Twelve layers of twelve sizes, called one by one from a frame that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4 + i, 5 + i) for i in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.steps:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x


@training_test(allow_eager=("steps.",))
def test_recompile_limit_leaves_the_result_right_and_is_reported(run: TrainingRun) -> None:
    model = run.shard(Ladder())
    for index in range(2):
        loss = model(models.features(index, run.rank)[0][:, :4]).square().mean()
        loss.backward()
        run.observe(loss, model)
    if not run.is_reference:
        report = graphshard.report(model)
        assert report.regions == 8  # Dynamo's limit
        assert [*report.captured_again] == [*range(1, 8)]
        assert f"region 1 was captured again: a guard failed: {report.captured_again[1]}" in str(report)
        assert report.eager_unshards == {f"steps.{i}.{name}": 2 for i in range(8, 12) for name in ("weight", "bias")}
        assert len(report.fallbacks) == 4


class Halves(nn.Module):
    """A graph break inside, in a frame that all models have in common."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x))


@training_test(allow_eager=("",))
def test_behind_the_recompile_limit_no_model_runs_the_code_of_another(run: TrainingRun) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        found = [run.shard(nn.Sequential(Halves(12), Halves(12))) for _ in range(4)]
        for index in range(2):
            for model in found:
                loss = model(models.features(index, run.rank)[0][:, :12]).square().mean()
                loss.backward()
                run.observe(loss, model)
