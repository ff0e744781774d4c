"""Programs planned by simulation: results equal eager FSDP2's, in the order that the plan says, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models import BITWISE, CASES
from torch.distributed.device_mesh import init_device_mesh

from graphshard.compat import eager_random_numbers
from graphshard.testing import WorkerPool, check_parity

BUDGETS = {"as FSDP2": None, "ample": 0.5}


def parity(case: str, memory_budget: float | None) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    arguments: dict[str, Any] = {"steps": 3, "tolerance": BITWISE, **CASES[case]}
    options = {"plan": "auto", "memory_budget": memory_budget}
    with eager_random_numbers():
        check_parity(mesh=mesh, backend="aot_eager", options=options, **arguments)


# Two ranks: a sum of two does not depend on what else is in its bucket.
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", CASES)
def test_auto_plan_is_bitwise_equal(two_ranks: WorkerPool, case: str, budget: str) -> None:
    two_ranks.run(parity, case, BUDGETS[budget])
