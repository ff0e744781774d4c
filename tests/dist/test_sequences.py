"""Calls, engines, flags and optimizer steps in any order: the numbers of the plain model, or a refusal by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import graphshard
from graphshard.testing import WorkerPool

# Of losses, gradients and parameters in float64, relative to the largest element: sums are made in another order than
# the plain model's, which is some units in the last place (2e-16), amplified by Adam's division in a dozen of steps.
BOUND = 1e-9


class Game:
    """A compiled model and a plain one that must stay equal, and random moves for both."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)  # the same on every rank
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        plain: Any = models.Decoder(layers=2).double()
        self.plain = plain
        self.model: Any = graphshard.compile(
            copy.deepcopy(plain), init_device_mesh("cpu", (dist.get_world_size(),)), backend="aot_eager"
        )
        self.parameters = dict(self.model.named_parameters())
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (self.model, plain)]
        self.batches = 0
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.syncs = True
        self.unreduced = False  # gradients that are held until a backward with synchronization
        self.moves: list[str] = []

    # -- moves

    def batch(self) -> Tensor:
        self.batches += 1
        return models.tokens(self.batches, self.rank)[0]

    def losses(self, inputs: Tensor, engine: Callable[[], Any]) -> tuple[Tensor, Tensor]:
        with engine():
            loss = self.model(inputs).square().mean()
        expected = self.plain(inputs).square().mean()
        self.same("loss", loss.detach(), expected.detach())
        return loss, expected

    @contextmanager
    def eager(self) -> Any:
        with graphshard.eager(self.model):
            yield

    @contextmanager
    def counting(self) -> Any:
        with FlopCounterMode(display=False):
            yield

    def forward(self) -> None:
        self.pending.append(self.losses(self.batch(), ExitStack))

    def forward_eager(self) -> None:
        self.pending.append(self.losses(self.batch(), self.eager))

    def backward(self) -> None:
        if self.pending:
            for loss in self.pending.pop(self.choose.randrange(len(self.pending))):
                loss.backward()
            self.unreduced = not self.syncs
            self.check()

    def backward_kept(self) -> None:
        if self.pending:
            for loss in self.choose.choice(self.pending):
                loss.backward(retain_graph=True)
            self.unreduced = not self.syncs
            self.check()

    def backward_of_all(self) -> None:
        if self.pending:
            for losses in zip(*self.pending, strict=True):
                sum(losses).backward()  # type: ignore[union-attr]
            self.pending.clear()
            self.unreduced = not self.syncs
            self.check()

    def backward_inside_eager(self) -> None:
        with graphshard.eager(self.model):
            self.backward()

    def train(self) -> None:
        self.forward()
        self.backward()

    def train_eager(self) -> None:
        with graphshard.eager(self.model):
            loss, expected = self.losses(self.batch(), ExitStack)
            loss.backward()
            expected.backward()
        self.unreduced = not self.syncs
        self.check()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses(self.batch(), ExitStack)

    def evaluate_eager(self) -> None:
        with torch.no_grad():
            self.losses(self.batch(), self.choose.choice([self.eager, self.counting]))
        self.check()

    def infer(self) -> None:
        with torch.inference_mode():
            self.losses(self.batch(), ExitStack)

    def unshard(self) -> None:
        module = self.choose.choice([self.model, *self.model.layers])
        if (handle := module.unshard(async_op=self.choose.random() < 0.5)) is not None:
            handle.wait()

    def reshard(self) -> None:
        self.choose.choice([self.model, *self.model.layers]).reshard()

    def mode(self) -> None:
        training = self.choose.random() < 0.5
        self.model.train(training)
        self.plain.train(training)

    def accumulate(self) -> None:
        if self.pending:
            return
        self.syncs = not self.syncs
        self.model.set_requires_gradient_sync(self.syncs)

    def clip(self) -> None:
        if self.unreduced or not any(p.grad is not None for p in self.plain.parameters()):
            return
        self.model.reshard()  # FSDP2's own rule: what stays gathered is no parameter of the optimizer
        for layer in self.model.layers:
            layer.reshard()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.average()
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
        self.same("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        self.averaged()

    def step(self) -> None:
        if self.unreduced or self.pending:  # a plain model's backward would notice that its weights have changed
            return
        self.average()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.check()

    def load(self) -> None:
        if self.pending:
            return
        state = {name: value * 0.999 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        self.plain.load_state_dict({name: value * 0.999 for name, value in self.plain.state_dict().items()})
        self.check()

    def freeze(self) -> None:
        if self.unreduced or self.pending:
            return
        name = self.choose.choice(sorted(self.parameters))
        for parameter in (self.parameters[name], self.plain.get_parameter(name)):
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None

    # -- the plain model's gradients: each rank's own, averaged when they are compared

    def average(self) -> None:
        """Replaces the plain gradients by their mean over the ranks."""
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def averaged(self) -> None:
        """They are the same on every rank now: the mean of further sums is still right."""

    def check(self) -> None:
        """Gradients, where they are reduced, and parameters."""
        for name, parameter in self.parameters.items():
            expected = self.plain.get_parameter(name)
            self.same(name, parameter.full_tensor().detach(), expected.detach())
            if self.unreduced:
                continue
            assert (parameter.grad is None) == (expected.grad is None), self.said(f"gradient of {name}")
            if parameter.grad is not None:
                mean = expected.grad.clone()
                dist.all_reduce(mean)
                self.same(f"gradient of {name}", parameter.grad.full_tensor(), mean / dist.get_world_size())

    def same(self, what: str, got: Tensor, want: Tensor) -> None:
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        assert error < BOUND, self.said(f"{what}: off by {error:.1e}")

    def said(self, what: str) -> str:
        return f"{what}, after {', '.join(self.moves)}"


MOVES = (
    "forward", "forward_eager", "backward", "backward_kept", "backward_of_all", "backward_inside_eager", "train",
    "train", "train_eager", "evaluate", "evaluate_eager", "evaluate_eager", "infer", "unshard", "reshard", "mode",
    "accumulate", "clip", "step", "step", "load", "freeze",
)  # fmt: skip


def play(seed: int, count: int) -> None:
    game = Game(seed)
    for _ in range(count):
        game.moves.append(game.choose.choice(MOVES))
        getattr(game, game.moves[-1])()


def forward_then_eager_then_backward(engine: str) -> None:
    game = Game(0)
    game.moves = ["forward", engine, "backward"]
    game.forward()
    with torch.no_grad():
        game.losses(game.batch(), getattr(game, engine))
    assert all(isinstance(p, DTensor) for p in game.model.parameters()), "FSDP2 left parameters gathered"
    game.backward()
    assert {name for name, _ in game.model.named_parameters()} == set(game.parameters)
    for name, parameter in game.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad is not None, name
    game.clip()
    game.step()
    with torch.no_grad():
        game.losses(game.batch(), getattr(game, engine))


@pytest.mark.parametrize("engine", ["eager", "counting"])
def test_eager_forward_between_forward_and_backward(two_ranks: WorkerPool, engine: str) -> None:
    two_ranks.run(forward_then_eager_then_backward, engine)


def test_random_sequences_have_the_plain_models_numbers(two_ranks: WorkerPool) -> None:
    two_ranks.run(play, 0, 50)
