"""What modules see of their parameters in forward, by `parameters` and its like: what FSDP2 has registered there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import TrainingRun, WorkerPool, training_test

pytestmark = pytest.mark.row("X8")

DIM = models.DIM


class Asking(nn.Module):
    """A block whose forward is a function of it; `own` is a parameter of its own, the rest is in containers."""

    def __init__(self, ask: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(-1, 1, DIM))
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.tied = nn.ModuleDict({"in": nn.Linear(DIM, DIM), "out": nn.Linear(DIM, DIM)})
        self.tied["out"].weight = self.tied["in"].weight
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self, x)


def through(block: Any, x: Tensor) -> Tensor:
    out: Tensor = block.tied["out"](block.tied["in"](block.mlp(x * block.own))) + block.frozen(x)
    return out


def dtype_of_first(block: Any, x: Tensor) -> Tensor:
    return through(block, x.double().to(next(block.parameters()).dtype))


def dtype_inside(block: Any, x: Tensor) -> Tensor:
    return through(block, x.double().to(next(block.mlp.parameters()).dtype))


def penalty(block: Any, x: Tensor) -> Tensor:
    return through(block, x) + sum(param.square().mean() for param in block.parameters())


def penalty_inside(block: Any, x: Tensor) -> Tensor:
    return through(block, x) + torch.stack([param.norm() for param in block.mlp.parameters()]).sum()


def by_name(block: Any, x: Tensor) -> Tensor:
    for name, param in block.named_parameters("block"):
        if name.endswith("bias"):
            x = x + param
        elif name == "block.tied.in.weight":
            x = F.linear(x, param + block.get_parameter("tied.in.weight"))
    return through(block, x)


def all_of_tied(block: Any, x: Tensor) -> Tensor:
    for _, param in block.tied.named_parameters(remove_duplicate=False):
        x = x + param.mean()
    return through(block, x)


def own_alone(block: Any, x: Tensor) -> Tensor:
    for param in block.parameters(recurse=False):
        x = x * param
    return through(block, x)


def behind_a_break(block: Any, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return penalty(block, x)


@torch.compiler.disable
def outside_any_graph(block: Any) -> Tensor:
    total: Tensor = sum(param.square().mean() for param in block.mlp.parameters())  # type: ignore[assignment]
    return total


def outside(block: Any, x: Tensor) -> Tensor:
    return through(block, x) + outside_any_graph(block)


class Stack(nn.Module):
    """Asks for the dtype of what the root owns first."""

    def __init__(self, ask: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Asking(ask) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(next(self.parameters()).dtype))
        for block in self.blocks:
            x = block(x)
        return x


class AskingForAll(Stack):
    """Asks for all parameters, too: those of blocks are shards then."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        dtypes = [param.dtype for param in self.parameters()]
        shapes = [param.shape for param in self.blocks.parameters()]
        return x + len(shapes) + sum(dtype == dtypes[0] for dtype in dtypes)


def train(run: TrainingRun, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        x = models.features(step, run.rank)[0]
        loss = model(x if step < 2 or run.rank == 0 else x[:1]).float().square().mean()
        loss.backward()
        run.observe(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        run.observe(model(models.features(3, run.rank)[0]), model)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize("ask", [dtype_of_first, dtype_inside, penalty], ids=lambda ask: ask.__name__)
@training_test(tolerance=BITWISE, expect_collectives="at_most")
def test_parameters_of_a_block_in_param_dtype(run: TrainingRun, ask: Any) -> None:
    train(run, run.shard(Stack(ask), mp_policy=LOW))


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), LOW], ids=["usual", "low"])
@training_test(tolerance=BITWISE, expect_collectives="at_most")
def test_parameters_of_all_that_the_root_has(run: TrainingRun, policy: MixedPrecisionPolicy) -> None:
    train(run, run.shard(AskingForAll(through), mp_policy=policy))


@pytest.mark.parametrize(
    "ask", [penalty, penalty_inside, by_name, all_of_tied, own_alone], ids=lambda ask: ask.__name__
)
@training_test(tolerance=BITWISE, expect_collectives="at_most")
def test_parameters_of_a_block(run: TrainingRun, ask: Any) -> None:
    train(run, run.shard(Stack(ask)))


@pytest.mark.parametrize("ask", [behind_a_break, outside], ids=lambda ask: ask.__name__)
@training_test(tolerance=BITWISE, allow_eager=("blocks.", "Asking", "first"))
def test_parameters_of_a_block_behind_graph_breaks(run: TrainingRun, ask: Any) -> None:
    train(run, run.shard(Stack(ask)))


@training_test(tolerance=BITWISE, allow_eager=("first",))
def test_parameters_of_blocks_that_are_regions(run: TrainingRun) -> None:
    train(run, run.shard(Stack(penalty), mp_policy=LOW, **({} if run.is_reference else {"regions": "unit"})))


class Outer(nn.Module):
    """Asks a block, from outside."""

    def __init__(self, ask: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Asking(through) for _ in range(3))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(self.ask(block, x).to(x.dtype))
        return x


def dtype_from_outside(block: nn.Module, x: Tensor) -> Tensor:
    found = torch.sigmoid(x.float()).to(next(block.parameters()).dtype)
    return found + found * found


def shards_from_outside(block: nn.Module, x: Tensor) -> Tensor:
    for param in block.parameters():
        assert isinstance(param, DTensor)
        x = x + param.full_tensor().square().mean()
    return x


def local_from_outside(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        norms = [param.to_local().norm() for param in next(block.children()).parameters()]
    return x * torch.stack(norms).mean()


OUTSIDERS = [dtype_from_outside, shards_from_outside, local_from_outside]


@pytest.mark.parametrize("ask", OUTSIDERS, ids=lambda ask: ask.__name__)
@training_test(tolerance=BITWISE, expect_collectives=None)
def test_parameters_of_a_unit_that_is_asked_from_outside(run: TrainingRun, ask: Any) -> None:
    train(run, run.shard(Outer(ask), **({"mp_policy": LOW} if ask is dtype_from_outside else {})))


@training_test(tolerance=BITWISE)
def test_hooks_behind_a_forward_see_shards(run: TrainingRun) -> None:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * (2 if next(module.parameters()).dtype == torch.bfloat16 else 1)

    model: Any = run.shard(Outer(lambda block, x: x), mp_policy=LOW)
    for block in model.blocks:
        block.register_forward_hook(hook)
    train(run, model)


@training_test(tolerance=BITWISE)
def test_slices_of_containers_have_parameters(run: TrainingRun) -> None:
    model: Any = run.shard(Stack(penalty))
    assert len(list(model.blocks[1:].parameters())) == 2 * len(list(model.blocks[0].parameters()))
    for param in model.blocks[:1].parameters():
        param.requires_grad_(False)
    train(run, model)


class AskingFirst(Outer):
    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.blocks[1].parameters()).dtype
        found: Tensor = super().forward(x * (2 if dtype == torch.float32 else 1))
        return found


@training_test(tolerance=BITWISE, allow_eager=("",))
def test_a_forward_that_fails_leaves_no_trace(run: TrainingRun) -> None:
    def fail(module: nn.Module, inputs: Any) -> None:
        raise ArithmeticError("asked for")

    model: Any = run.shard(AskingFirst(lambda block, x: x), mp_policy=LOW)
    if not run.is_reference:  # eager FSDP2 needs reset_iter_state() after it
        handle = model.blocks[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(*models.features(0, run.rank))
        handle.remove()
    train(run, model)


class Added(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class ParametrizedInForward(nn.Module):
    """Adds to the weight of its inner layer while it calls that, as peft's `target_parameters` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.a, self.b = nn.Parameter(torch.randn(DIM, 2)), nn.Parameter(torch.randn(2, DIM))
        self.checkpointed = False

    def parametrized(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.inner, "weight", Added(self.a @ self.b))
        try:
            with parametrize.cached():
                out: Tensor = self.inner(x)
                return out
        finally:
            parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        run = partial(checkpoint, self.parametrized, use_reentrant=False) if self.checkpointed else self.parametrized
        return x + torch.tanh(self.down(run(x)))


def train_parametrized(run: TrainingRun, frozen: bool, checkpointed: bool) -> None:
    torch.manual_seed(0)
    blocks = [ParametrizedInForward() for _ in range(2)]
    for block in blocks:
        block.inner.requires_grad_(not frozen)
        block.checkpointed = checkpointed
    model: Any = run.shard(nn.Sequential(*blocks))
    regions = 0
    for step in range(3):
        loss = model(models.features(step, run.rank)[0][: 2 + run.rank]).square().mean()
        loss.backward()
        run.observe(loss, model)
        if not run.is_reference:  # nothing is captured again for the classes that each parametrization makes
            before, regions = regions, graphshard.report(model).regions
    assert run.is_reference or before == regions
    with torch.no_grad():
        run.observe(model(*models.features(0, run.rank)).sum(), model)


@pytest.mark.parametrize(("frozen", "checkpointed"), [(False, False), (True, True)])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_parametrization_that_forward_registers_and_removes(run: TrainingRun, frozen: bool, checkpointed: bool) -> None:
    train_parametrized(run, frozen, checkpointed)


@training_test(world_size=1, tolerance=BITWISE, allow_eager=("",), expect_collectives=None)
def test_parametrization_on_one_rank(run: TrainingRun) -> None:
    train_parametrized(run, frozen=False, checkpointed=True)


class Halved(nn.Linear):
    """Registers another buffer in the place of its weight, for a while."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        del self.weight
        self.register_buffer("weight", weight / 2)
        try:
            return super().forward(x)
        finally:
            del self.weight
            self.register_parameter("weight", weight)


class SwappedInForward(nn.Linear):
    """Computes with another weight in the place of its own."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        del self.weight
        self.weight = 2 * weight
        try:
            return super().forward(x)
        finally:
            del self.weight
            self.register_parameter("weight", weight)


def taken_out(build: Callable[[], nn.Module], said: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(build(), build())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = graphshard.compile(copy.deepcopy(plain), mesh, backend="aot_eager")
    with pytest.raises(graphshard.UnsupportedModel, match=rf"\.weight: {said}.*graphshard\.eager"):
        model(*models.features(0, 0))
    for _ in range(2):
        with graphshard.eager(model):
            model(*models.features(0, 0)).square().mean().backward()
        plain(*models.features(0, 0)).square().mean().backward()
    for own, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad.full_tensor(), want.grad)  # alike on both ranks: half of their sum is each


SWAPPED = pytest.param(
    SwappedInForward,
    "taken out of its module, and another value put in its place",
    marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo fails itself where a parameter is written so"),
)


@pytest.mark.parametrize(
    ("build", "said"),
    [(Halved, "forward took it out of its module, and registers another value"), SWAPPED],
)
def test_parameter_that_forward_takes_out_for_another_value_is_named(
    two_ranks: WorkerPool, build: Callable[[], nn.Module], said: str
) -> None:
    two_ranks.run(taken_out, build, said)
