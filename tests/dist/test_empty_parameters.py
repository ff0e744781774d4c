"""Parameters without elements, beside others and in units of their own."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graphshard.testing import Bitwise, TrainingRun, training_test

pytestmark = pytest.mark.row("X4")

BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")


class Hollow(nn.Module):
    """A layer whose middle has no features, beside one that has."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.none, self.back = (
            nn.Linear(models.DIM, models.DIM),
            nn.Linear(models.DIM, 0),
            nn.Linear(0, models.DIM, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.whole(x)) + self.back(self.none(x))
        return out


class Rows(nn.Module):
    """Has no element at all, and a parameter that is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.unread = nn.Parameter(torch.empty(0, models.DIM)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x @ self.rows.t()], -1)


def build(trained: bool) -> nn.Sequential:
    """`trained`: parameters without elements, too."""
    model = nn.Sequential(Hollow(), Hollow(), Rows(), nn.Linear(models.DIM, models.DIM))
    for parameter in model.parameters():
        parameter.requires_grad_(trained or parameter.numel() > 0)
    return model


def loss_of(model: nn.Module, run: TrainingRun, index: int) -> Tensor:
    loss: Tensor = model(*models.features(index, run.rank)).float().square().mean()
    return loss


def train(run: TrainingRun, trained: bool = False, **options: Any) -> None:
    model = run.shard(build(trained), units=[Hollow, Rows], **options)
    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_of, counted=True)
    run.note_registration("trained", model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"strategy": "replicate"},
        {"regions": "unit"},
    ],
    ids=lambda options: " ".join(map(str, options)) or "as they are",
)
@training_test(tolerance=BITWISE)
def test_frozen_parameters_without_elements(run: TrainingRun, options: dict[str, Any]) -> None:
    train(run, **options)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}], ids=str)
@training_test(world_size=4, tolerance=BITWISE)
def test_frozen_parameters_without_elements_on_four_ranks(run: TrainingRun, options: dict[str, Any]) -> None:
    train(run, **options)


@training_test(world_size=4, mesh_shape=(2, 2), mesh_axes=("dp_replicate", "dp_shard"), tolerance=BITWISE)
def test_frozen_parameters_without_elements_in_hybrid_units(run: TrainingRun) -> None:
    train(run)


def gradient_shapes(model: nn.Module) -> dict[str, object]:
    """Of parameters without elements: whole and local, of the parameter and of its gradient."""
    shapes = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if not parameter.numel():
            parts = [parameter, parameter.to_local()]
            if isinstance(parameter.grad, DTensor):
                parts += [parameter.grad, parameter.grad.to_local()]
            shapes[name] = [tuple(part.shape) for part in parts]
    return shapes


# Eager FSDP2 fails in backward: "_chunk_cat expects non-empty tensor". It is the reference where they are frozen.
@pytest.mark.parametrize("synchronize", [True, False], ids=["reduced each time", "accumulated"])
@training_test(tolerance=BITWISE)
def test_parameters_without_elements_get_gradients_without_elements(run: TrainingRun, synchronize: bool) -> None:
    model: Any = run.shard(build(trained=not run.is_reference), units=[Hollow, Rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(synchronize or microbatch == 1)
            loss = loss_of(model, run, 2 * index + microbatch)
            loss.backward()
        run.note(f"loss {index}", loss)
        run.note(f"gradients {index}", {n: p.grad for n, p in model.named_parameters() if p.numel()})
        if not run.is_reference:
            for name, (whole, local, *of_gradient) in gradient_shapes(model).items():
                assert of_gradient == ([] if name.endswith("unread") else [whole, local]), name
        optimizer.step()
        optimizer.zero_grad()
    run.note("parameters", dict(model.named_parameters()))
