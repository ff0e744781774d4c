"""Gradients that a forward asks for itself, and whose own gradients backward takes: energies with forces, penalties.

The reference is the model on one rank, which every rank runs on the batches of all: eager FSDP2 frees parameters that
these need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.testing import WorkerPool

pytestmark = pytest.mark.row("X8")

DIM = 8


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(5))  # as many as have twins
        self.head = nn.Linear(DIM, 1)

    def score(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Forces(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            energy = self.score(x).sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy.detach() + forces.square().mean()


class Penalty(Blocks):
    """Penalizes the norm of a critic's gradient, as WGAN-GP does."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = (0.5 * x + 0.5 * x.flip(0)).requires_grad_(True)
        (grad,) = torch.autograd.grad(self.score(mixed).sum(), mixed, create_graph=True)
        return self.score(x).mean() + 10 * (grad.norm(dim=1) - 1).square().mean()


class AdaptiveWeight(Blocks):
    """Weights a loss by the gradient of another one for a parameter, as VQGAN does."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        for block in self.blocks:
            x = block(x)
        score = F.linear(x, weight)
        (grad,) = torch.autograd.grad(score.square().mean(), weight, retain_graph=True)
        return score.mean() * grad.norm().detach()


def step(model: nn.Module, number: int, rank: int, share: float = 1.0) -> Tensor:
    x = torch.randn(3 + rank + number, DIM, generator=torch.Generator().manual_seed(10 * number + rank))
    loss: Tensor = model(x)
    if loss.requires_grad:
        (loss * share).backward()
    return loss.detach()


def is_the_mean_of_ranks(build: Callable[[], nn.Module]) -> str:
    torch.manual_seed(0)
    plain, count = build(), dist.get_world_size()
    model = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (count,)), backend="aot_eager")
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.01) for of in (model, plain)]
    for number in range(3):
        want = [step(plain, number, rank, 1 / count) for rank in range(count)][dist.get_rank()]
        assert torch.equal(step(model, number, dist.get_rank()), want)
        for own, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
            if of_plain.grad is None:
                assert own.grad is None
            else:
                assert isinstance(own.grad, DTensor)
                assert torch.equal(own.grad.full_tensor(), of_plain.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.eval(), plain.eval()
        if isinstance(plain, Forces):
            assert torch.equal(step(model, 3, dist.get_rank()), step(plain, 3, dist.get_rank()))
    return str(graphshard.report(model))


@pytest.mark.parametrize(
    "build",
    [Forces, partial(Forces, checkpointed=True), Penalty, AdaptiveWeight],
    ids=["forces", "checkpoint", "gp", "vq"],
)
def test_gradients_in_forward_train_as_on_one_rank(two_ranks: WorkerPool, build: Callable[[], nn.Module]) -> None:
    for report in two_ranks.run(is_the_mean_of_ranks, build):
        assert "equal blocks are traced one by one: forward asks for gradients" in report
        assert "calls of blocks captured as those of their twins" in report
        assert "outside any graph" not in report


class ReadAgain(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        torch.autograd.grad(score.mean(), self.head.weight, retain_graph=True, allow_unused=True)
        return score.mean()


class ReadForBoth(Blocks):
    """Asks for the gradient of a read that is a part of what it differentiates."""

    def forward(self, x: Tensor) -> Tensor:
        weight, score = self.head.weight, self.score(x)
        torch.autograd.grad(score.mean() + weight.square().mean(), weight, retain_graph=True)
        return score.mean()


class OfATwin(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        weight, score = self.blocks[-1].up.weight, self.score(x)  # type: ignore[union-attr]
        torch.autograd.grad(score.mean(), weight, retain_graph=True, allow_unused=True)
        return score.mean()


def read_apart(build: Callable[[], nn.Module], name: str) -> None:
    model = graphshard.compile(build(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    with pytest.raises(graphshard.UnsupportedModel, match=rf"the gradient of {name} .*, and reads it elsewhere, too"):
        step(model, 0, 0)


@pytest.mark.parametrize(
    ("build", "name"),
    [(ReadAgain, r"head\.weight"), (ReadForBoth, r"head\.weight"), (OfATwin, r"blocks\.4\.up\.weight")],
)
def test_gradient_of_one_read_of_several_is_refused(
    two_ranks: WorkerPool, build: Callable[[], nn.Module], name: str
) -> None:
    two_ranks.run(read_apart, build, name)


class Adjoint(torch.autograd.Function):
    """Recomputes a block in backward, and asks for its gradients there, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.block(x), [x, *ctx.block.parameters()], grads[0])


class Solves(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Adjoint.apply(self.blocks[0], x, *self.blocks[0].parameters())  # type: ignore[no-untyped-call]
        return self.head(out).mean()


def adjoint() -> None:
    model = graphshard.compile(Solves(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    with pytest.raises(
        graphshard.UnsupportedModel, match=r"the backward of a torch.autograd.Function does, of a param"
    ):
        step(model, 0, 0)
    with graphshard.eager(model):
        step(model, 0, 0)
    assert all(parameter.grad is not None for parameter in model.blocks[0].parameters())


def test_gradients_of_parameters_in_a_backward_of_users_are_refused_by_name(two_ranks: WorkerPool) -> None:
    two_ranks.run(adjoint)


class TrainsInForward(Blocks):
    """Trains its head beside the rest, on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.head(x.detach()).square().mean().backward()
        return x.mean()


def trains_in_forward() -> None:
    torch.manual_seed(0)
    plain = TrainsInForward()
    model = graphshard.compile(copy.deepcopy(plain), init_device_mesh("cpu", (2,)), backend="aot_eager")
    for number in range(2):
        step(model, number, 0)  # alike on both ranks: the mean is each
        step(plain, number, 0)
    for own, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(own.grad, DTensor)
        assert torch.equal(own.grad.full_tensor(), want.grad)
    assert "forward calls backward, which reaches parameters" in str(graphshard.report(model))


def test_backward_in_forward_runs_as_it_is(two_ranks: WorkerPool) -> None:
    two_ranks.run(trains_in_forward)
