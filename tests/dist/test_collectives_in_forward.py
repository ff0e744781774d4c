"""Collectives that a forward calls itself: their values and gradients are those of eager, where `torch.compile` alone
gives gradients to what c10d's collectives write.
"""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from test_training import BITWISE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import RankFailed, TrainingRun, WorkerPool, training_test

DIM = models.DIM


def gather_list(x: Tensor) -> Tensor:
    """As contrastive losses do; a rank's own features have a gradient."""
    gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    other = torch.cat(gathered).mean(0)
    gathered[dist.get_rank()] = x
    return torch.cat(gathered).mean(0) * x + other


def exchange(x: Tensor) -> Tensor:
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x.contiguous())
    return x * exchanged


def reduce_in_place(x: Tensor) -> Tensor:
    """Its gradient passes as it is."""
    mean = x.mean(0)
    dist.all_reduce(mean)
    return x - mean / dist.get_world_size()


def reduce_what_backward_needs(x: Tensor) -> Tensor:
    """Backward of `exp` has what was reduced: autograd does not see that it is written."""
    weights = x.exp()
    dist.all_reduce(weights)
    return x * weights / 10


def broadcast(x: Tensor) -> Tensor:
    first = x.sin()
    dist.broadcast(first, 0)
    return x * first


def reduce_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean(0)
        dist.all_reduce(mean)
    return x - mean / dist.get_world_size()


def reduce_with_gradient(x: Tensor) -> Tensor:
    return x * funcol.all_reduce(x.mean(0), "sum", dist.group.WORLD)


def gather_with_gradient(x: Tensor) -> Tensor:
    """Copies it, too: not each copy of what was gathered is c10d's."""
    gathered = torch.zeros_like(x)
    gathered.copy_(funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[: len(x)])
    return x * gathered


class Layer(nn.Module):
    def __init__(self, communicate: Callable[[Tensor], Tensor], checkpointed: bool) -> None:
        super().__init__()
        self.inner, self.communicate, self.checkpointed = models.Mlp(), communicate, checkpointed

    def body(self, x: Tensor) -> Tensor:
        return self.communicate(x + self.inner(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Layers(nn.Module):
    def __init__(self, communicate: Callable[[Tensor], Tensor], count: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(communicate, checkpointed) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    return model(*models.features(index, run.rank)).square().mean()


def trained(run: TrainingRun, model: nn.Module) -> None:
    model = run.shard(model)
    run.train(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_of, steps=2)


COLLECTIVES = (
    gather_list,
    exchange,
    reduce_in_place,
    reduce_what_backward_needs,
    broadcast,
    reduce_without_gradient,
    reduce_with_gradient,
    gather_with_gradient,
)


@pytest.mark.parametrize("communicate", COLLECTIVES, ids=lambda function: function.__name__)
@training_test(tolerance=BITWISE)
def test_gradients_are_those_without_a_trace(run: TrainingRun, communicate: Callable[[Tensor], Tensor]) -> None:
    trained(run, Layers(communicate))


@pytest.mark.parametrize("communicate", [gather_list, reduce_in_place], ids=lambda function: function.__name__)
@training_test(tolerance=BITWISE)
def test_gradients_in_a_checkpoint(run: TrainingRun, communicate: Callable[[Tensor], Tensor]) -> None:
    trained(run, Layers(communicate, count=2, checkpointed=True))


def gather(x: Tensor) -> Tensor:
    gathered = x.new_empty(dist.get_world_size() * len(x), DIM)
    dist.all_gather_into_tensor(gathered, x)
    return x * gathered.mean(0)


def gather_list_as_one(x: Tensor) -> Tensor:
    gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    return x * torch.cat(gathered).mean(0)


@training_test(tolerance=BITWISE)
def test_gather_into_a_tensor_has_no_gradient(run: TrainingRun) -> None:
    """With gloo and a gradient it fails in eager."""
    trained(run, Layers(gather_list_as_one if run.is_reference else gather))


def gather_with_own(x: Tensor) -> Tensor:
    """Which of what was gathered is read depends on the rank."""
    gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    gathered[dist.get_rank()] = x
    return torch.cat(gathered).mean(0) * x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return gather_with_own(x + nn.functional.gelu(self.inner(x)))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.normalize(layer(x), dim=-1)
        return x


@pytest.mark.parametrize("plan", ["auto", "fsdp2"])
@training_test(tolerance=BITWISE)
def test_order_among_a_model_s_own_is_one_where_ranks_run_other_code(run: TrainingRun, plan: str) -> None:
    """So many layers that buckets are launched between collectives, elsewhere in the graph of each rank."""
    model = run.shard(Normalized(), plan=plan)
    run.train(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_of, steps=2)


class Broken(Layers):
    """Breaks the graph on one rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return super().forward(x)


def broken_on_one_rank() -> None:
    graphshard.compile(Broken(reduce_in_place), init_device_mesh("cpu", (2,)), backend="aot_eager")(
        *models.features(0, dist.get_rank())
    )


def test_rank_whose_graph_breaks_alone_is_told(two_ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"collectives of its own .* want no graph break on this rank"):
        two_ranks.run(broken_on_one_rank)
