"""Models of every kind, compiled, against eager FSDP2: bitwise with aot_eager, within a stated bound with Inductor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any
from unittest import mock

import models
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from graphshard.compat.inductor import eager_random_numbers
from graphshard.testing import Bitwise, Ulps, WorkerPool, check_parity

# -0.0: what a dead branch adds to a gradient.
BITWISE = Bitwise(equal_zeros="a sum with a zero term loses the sign of zero")
# Gradients and parameters here are of order 1e-2 to 1; three steps of fp32 with sums fused and reordered.
INDUCTOR = Ulps(64, "Inductor fuses pointwise chains and sums in vector lanes", atol=2e-6)

CASES: dict[str, dict[str, Any]] = {
    "decoder": {"build": lambda: models.Decoder(layers=2), "inputs": models.tokens},
    "tied": {"build": models.tied_decoder, "inputs": models.tokens},
    "checkpointed": {"build": lambda: models.Checkpointed(layers=2), "inputs": models.tokens},
    "read_thrice": {"build": models.ReadThrice, "inputs": models.features},
    "conv_batchnorm": {"build": models.ConvNet, "inputs": models.images},
    "lstm": {
        "build": models.Recurrent,
        "inputs": models.sequences,
        "allow_eager": ("rnn",),
        "expect_collectives": None,
    },
    "dropout": {"build": models.Dropped, "inputs": models.features},
    "low_rank": {"build": models.LowRank, "inputs": models.features},
    "partly_frozen": {"build": models.PartlyFrozen, "inputs": models.features},
    "uneven": {"build": models.Uneven, "inputs": models.features},
    "buffers": {"build": models.Buffered, "inputs": models.features},
    "nested": {"build": models.Nested, "inputs": models.nested_inputs},
    "unused_output": {"build": models.TwoHeads, "inputs": models.features, "loss": models.main_loss},
    "unused_views": {"build": models.Views, "inputs": models.features, "loss": models.main_loss},
    "growing_batch": {"build": models.ReadThrice, "inputs": models.growing_features},
    "graph_breaks": {"build": models.Broken, "inputs": models.features, "expect_collectives": None},
    "unlike_blocks": {"build": models.unlike_blocks, "inputs": models.features},
    "parameter_lists": {"build": models.ListParameters, "inputs": models.features},
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Not Adam where bits may differ: it turns a gradient's last bit near zero into a whole step.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def parity(case: str, backend: str, device: str = "cpu", plan: str = "fsdp2") -> dict[str, Any]:
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    arguments: dict[str, Any] = {"steps": 3, "tolerance": BITWISE, "options": {"plan": plan}, **CASES[case]}
    if backend == "eager":  # gathers and reduces one parameter at a time
        arguments |= {"expect_collectives": None, "steps": 2}
    if backend == "inductor":
        arguments |= {"tolerance": INDUCTOR, "optimizer": sgd, "steps": 2}
    # Every fake value is computed again after each pass.
    with mock.patch.dict(os.environ, GRAPHSHARD_VERIFY="2"), eager_random_numbers():
        result = check_parity(mesh=mesh, backend=backend, **arguments)
    return {"launches": result.launches[-1], "eager": result.eager_launches[-1]}


@pytest.mark.parametrize("case", CASES)
def test_aot_eager_is_bitwise_equal(two_ranks: WorkerPool, case: str) -> None:
    two_ranks.run(parity, case, "aot_eager")


@pytest.mark.parametrize("case", ["tied", "uneven"])
def test_aot_eager_is_bitwise_equal_on_four_ranks(four_ranks: WorkerPool, case: str) -> None:
    four_ranks.run(parity, case, "aot_eager")


@pytest.mark.parametrize("case", ["tied", "lstm", "nested", "graph_breaks"])
def test_backend_eager_is_bitwise_equal(two_ranks: WorkerPool, case: str) -> None:
    two_ranks.run(parity, case, "eager")


@pytest.mark.parametrize("case", ["decoder", "conv_batchnorm", "dropout", "graph_breaks"])
def test_inductor_is_within_its_bound(two_ranks: WorkerPool, case: str) -> None:
    if case == "conv_batchnorm" and torch.__version__ < "2.12":
        pytest.skip("Inductor of torch 2.11 cannot lower a convolution whose bias is a view of a computed buffer")
    two_ranks.run(parity, case, "inductor")
