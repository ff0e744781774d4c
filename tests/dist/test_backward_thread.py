"""Backward in a thread that is not forward's, as autograd runs it on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import torch
from test_training import BITWISE
from torch import Tensor, nn

from graphshard.testing import TrainingRun, training_test


def sequences(index: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(2, 6, models.DIM, generator=models.generator(index, rank)),)


MODELS = {
    "checkpointed": (models.Checkpointed, models.tokens),
    "broken": (models.Broken, models.features),
    "recurrent": (models.Recurrent, sequences),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("regions", ["model", "unit"])
@training_test(tolerance=BITWISE, allow_eager=("",))
def test_backward_runs_in_a_thread_of_its_own(run: TrainingRun, name: str, regions: str) -> None:
    build, inputs = MODELS[name]
    model = run.shard(build(), **({} if run.is_reference else {"regions": regions}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ThreadPoolExecutor(max_workers=1) as thread:
        for index in range(4):
            model.set_requires_gradient_sync(index % 2 == 1)  # type: ignore[operator]
            loss = nn.functional.mse_loss(out := model(*inputs(index, run.rank)), torch.zeros_like(out))
            thread.submit(loss.backward).result()
            run.observe(loss, model)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
