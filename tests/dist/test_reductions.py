"""How gradients are reduced, where the user has a say: factors, sums, hooks, collectives of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx

import graphshard
from graphshard.fsdp2 import units
from graphshard.testing import Bitwise, TrainingRun, training_test

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
AXES = ("dp_replicate", "dp_shard")

Change = Callable[[Any], object]


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).float().square().mean()
    return loss


def train(run: TrainingRun, model: Any, changes: Sequence[Change | None]) -> None:
    """A step as it is, then one after each change. SGD: Adam would hide a factor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index, change in enumerate([None, *changes]):
        if change is not None:
            change(model)
        with run.counted(f"step {index}") if index else nullcontext():
            loss = loss_of(model, run, index)
            loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


def each(name: str, *values: Any) -> Change:
    """Calls a setter, which does not recurse, of every unit."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, name)(*values)

    return change


def one(name: str, *values: Any) -> Change:
    return lambda model: getattr(model[1], name)(*values)


FACTOR, SUM = "set_gradient_divide_factor", "set_force_sum_reduction_for_comms"


# gloo has no reduction that multiplies first: other factors than the number of ranks need plain sums.
@pytest.mark.row("S30")
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float64], ids=str)
@training_test(tolerance=BITWISE)
def test_divide_factor_and_plain_sums_are_switched(run: TrainingRun, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = run.shard(models.mlps(2), units=[models.Mlp], mp_policy=policy)
    train(run, model, [each(SUM, True), each(FACTOR, 3.0), one(FACTOR, 5.0), each(FACTOR, 2.0), each(SUM, False)])


@pytest.mark.row("S30", "S35")
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_hybrid_divide_factor_and_plain_sums_are_switched(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2), units=[models.Mlp])
    train(run, model, [each(SUM, True), each(FACTOR, 3.0), each(FACTOR, 2.0), each(SUM, False), one(SUM, True)])


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_all_reduce_hook_sees_and_changes_each_reduced_buffer(run: TrainingRun) -> None:
    seen: list[tuple[int, str]] = []

    def halve(gradient: Tensor) -> None:
        seen.append((gradient.numel(), str(gradient.dtype)))
        gradient.mul_(0.5)

    def double(gradient: Tensor) -> None:
        seen.append((-gradient.numel(), str(gradient.dtype)))
        gradient.mul_(2)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = run.shard(models.mlps(2), units=[models.Mlp], mp_policy=half)
    train(run, model, [each("set_all_reduce_hook", halve), one("set_all_reduce_hook", double)])
    run.note("calls", seen)


@pytest.mark.row("S35")
@pytest.mark.parametrize("own_axis", [False, True])
@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=AXES, tolerance=BITWISE)
def test_all_reduce_hook_over_the_other_axis(run: TrainingRun, own_axis: bool) -> None:
    """Behind FSDP2's own all-reduce, or in its place."""
    group = run.mesh["dp_replicate"].get_group()

    def average(gradient: Tensor) -> None:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)

    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        for module in [*list(model.children())[1:], model]:
            fully_shard(module, mesh=mesh if own_axis else mesh["dp_shard"])

    model = run.shard(models.mlps(2), annotate=annotate)
    train(run, model, [each("set_all_reduce_hook", average), None])
    _, launches = run.counts[-1]
    assert (launches["reduce_scatter"], launches["all_reduce"]) == (3, 6 if own_axis else 3)


class Gather:
    """A collective of the user's own, with its own buffers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.seen.append(("allocate", int(torch.Size(size).numel())))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.seen.append(("gather", input_tensor.numel()))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    """Doubles what it reduces: a program that reduced by itself would be seen."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.seen.append((f"scatter {op}", input_tensor.numel()))
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        output_tensor.mul_(2)
        return work


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_collectives_of_the_users_own_move_every_byte(run: TrainingRun) -> None:
    gather, scatter = Gather(), Scatter()
    model = run.shard(models.mlps(2), units=[models.Mlp])
    train(run, model, [each("set_custom_all_gather", gather), each("set_custom_reduce_scatter", scatter)])
    if run.is_reference:
        assert len([kind for kind, _ in gather.seen if kind == "gather"]) == 10
    reduced = [call for call in scatter.seen if call[0] != "allocate"]
    assert len(reduced) == 3
    run.note("reduced", reduced)


@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_one_unit_has_collectives_of_its_own(run: TrainingRun) -> None:
    gather, scatter = Gather(), Scatter()
    model = run.shard(models.mlps(2), units=[models.Mlp])
    train(run, model, [one("set_custom_all_gather", gather), one("set_custom_reduce_scatter", scatter)])
    sizes = [size for kind, size in gather.seen if kind == "gather"]  # a backward may gather what it reads alone
    assert max(sizes) == sizes[0] == sum(p.numel() for p in models.Mlp().parameters()) // 2
    run.note("reduced", [call for call in scatter.seen if call[0] != "allocate"])


@training_test(tolerance=BITWISE)
def test_torchs_own_collectives_with_other_memory_are_awaited_where_they_are_needed(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2), units=[models.Mlp])
    with patch.object(units, "register_work", wraps=units.register_work) as under_way:
        train(run, model, [each("set_allocate_memory_from_process_group_for_comm", True)])
    if not run.is_reference:
        assert {work.args[1] is not None for work in under_way.mock_calls} == {True}
        assert under_way.call_count >= 3 * (1 + 1)  # of each unit, a gather and a reduction


class Branches(nn.Module):
    """Two layers, of which a forward takes one; both are in the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(models.DIM, models.DIM)
        self.branches = nn.ModuleList(nn.Linear(models.DIM, 3) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        out: Tensor = self.branches[branch](torch.tanh(self.body(x)))
        return out


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this torch has no set_reduce_scatter_unused_params",
)
@pytest.mark.row("S23")
@training_test(tolerance=BITWISE)
def test_unused_parameters_get_zeros_where_asked_for(run: TrainingRun) -> None:
    model: Any = run.shard(Branches(), units=[])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, reduce_unused in enumerate([False, True, False, True]):
        model.set_reduce_scatter_unused_params(reduce_unused)
        loss = model(*models.features(index, run.rank), index // 2).square().mean()
        loss.backward()
        unused = model.branches[1 - index // 2].weight.grad
        assert (unused is not None) == reduce_unused
        assert unused is None or not unused.to_local().any()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this torch has no set_reduce_scatter_unused_params",
)
@pytest.mark.row("S23")
@training_test(tolerance=BITWISE)
def test_ranks_may_use_different_parameters_of_a_unit(run: TrainingRun) -> None:
    model: Any = run.shard(Branches(), units=[])
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        loss = model(*models.features(index, run.rank), (index + run.rank) % 2).square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"),
    reason="this torch has no set_reduce_scatter_max_input_buffers",
)
@pytest.mark.row("S30")
@training_test(tolerance=BITWISE)
def test_hints_about_buffers_and_groups_change_no_bit(run: TrainingRun) -> None:
    model = run.shard(models.mlps(2), units=[models.Mlp])
    hints = [
        lambda model: model.set_reduce_scatter_max_input_buffers(2),
        lambda model: model.set_separate_reduce_scatter_group(True),
        lambda model: model.set_separate_reduce_scatter_group(False),
    ]
    train(run, model, hints)


@pytest.mark.row("S37")
@training_test(tolerance=BITWISE)
def test_roots_that_share_their_streams(run: TrainingRun) -> None:
    def annotate(model: nn.Module, mesh: DeviceMesh) -> None:
        roots = [fully_shard(child, mesh=mesh) for child in model.children()]
        share_comm_ctx(roots)

    model = run.shard(nn.Sequential(*(models.Mlp() for _ in range(3))), annotate=annotate)
    train(run, model, [None, None])


class FragileBackward(nn.Module):
    """Its backward raises in the middle, behind a graph break in a block, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Broken(layers=3)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.layers[0](self.inner.embed(x))
        if self.fail:
            x.register_hook(_raise)
        return self.inner.head(self.inner.layers[2](self.inner.layers[1](x)))


def _raise(grad: Tensor) -> None:
    raise ArithmeticError("asked for")


@pytest.mark.parametrize("accumulates", [False, True])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_a_backward_that_fails_leaves_no_gradient_to_a_later_one(run: TrainingRun, accumulates: bool) -> None:
    model: Any = run.shard(FragileBackward(), units=[models.BrokenBlock])
    for step in range(3):
        if step == 1 and not run.is_reference:  # eager FSDP2 needs reset_iter_state() after it
            model.fail = True
            with pytest.raises(ArithmeticError):
                model(*models.features(9, run.rank)).square().mean().backward()
            model.fail = False
            model.zero_grad()
        for last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(last)
            loss = model(*models.features(step, run.rank)).square().mean()
            loss.backward()
        run.observe(loss, model)
        model.zero_grad()
    if not run.is_reference:
        assert [note for note in graphshard.report(model).notes if "a backward has failed" in note]


@pytest.mark.parametrize("later", ["another backward", "eager"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_a_backward_that_fails_leaves_no_gradient_without_a_forward_behind_it(run: TrainingRun, later: str) -> None:
    model: Any = run.shard(FragileBackward(), units=[models.BrokenBlock])
    for step in range(3):
        fails = step == 1 and not run.is_reference
        if fails:
            model.fail = True
            failing = model(*models.features(9, run.rank)).square().mean()
            model.fail = False
        loss = model(*models.features(step, run.rank)).square().mean() if later != "eager" else None
        if fails:
            with pytest.raises(ArithmeticError):
                failing.backward()
            model.zero_grad()
        if loss is None:
            with nullcontext() if run.is_reference or not step else graphshard.eager(model):
                loss = model(*models.features(step, run.rank)).square().mean()
                loss.backward()
        else:
            loss.backward()
        run.observe(loss, model)
        model.zero_grad()


class Uncaptured(nn.Linear):
    """Code that is not compiled reads its parameters."""

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_a_hook_that_raises_at_the_end_of_backward_leaves_no_gradient(run: TrainingRun, name: str) -> None:
    blocks = (Uncaptured(models.DIM, models.DIM) for _ in range(3))
    model: Any = run.shard(nn.Sequential(*blocks, nn.Linear(models.DIM, models.DIM)), units=[Uncaptured])
    raises: list[bool] = []

    def hook(parameter: Tensor) -> None:
        if raises:
            raises.clear()
            raise FloatingPointError("not finite")

    dict(model.named_parameters())[name].register_post_accumulate_grad_hook(hook)
    for step in range(3):
        if step == 1 and not run.is_reference:
            raises.append(True)
            with pytest.raises(FloatingPointError):
                model(*models.features(9, run.rank)).square().mean().backward()
            model.zero_grad()
        loss = model(*models.features(step, run.rank)).square().mean()
        loss.backward()
        run.observe(loss, model)
        model.zero_grad()
