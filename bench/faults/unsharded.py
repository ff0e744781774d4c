"""The same job without shards: a copy of the whole model for each rank, with the mean of all ranks' gradients."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from bench.faults.outcomes import Result
from bench.faults.worker import LEARNING_RATE, RankJob, Spec


def unsharded(name: str, world_size: int) -> list[Result]:
    """Losses of each rank, and its part of the parameters in the end. `name`: of the fault."""
    with tempfile.TemporaryDirectory(prefix="graphshard-faults-") as folder:
        spec = Spec(name, world_size, 0, "none", 0.0)
        jobs = [RankJob(Path(folder), rank, spec) for rank in range(world_size)]
        optimizers = [torch.optim.SGD(job.model.parameters(), lr=LEARNING_RATE) for job in jobs]
        results: list[Result] = [([], {}) for _ in jobs]
        for step in range(1, jobs[0].steps + 1):
            for job, (losses, _) in zip(jobs, results, strict=True):
                if (loss := job.backward_of(step)) is not None:
                    losses.append(loss)
            average_gradients([job.model for job in jobs])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for job, (_, parts) in zip(jobs, results, strict=True):
        for parameter_name, parameter in job.model.named_parameters():
            parts[parameter_name] = parameter.detach().chunk(world_size)[job.rank].clone()
    return results


def average_gradients(models: list[nn.Module]) -> None:
    """Gives each model the mean of their gradients; one that a model lacks is zero."""
    for copies in zip(*(model.parameters() for model in models), strict=True):
        found = [copy.grad for copy in copies if copy.grad is not None]
        if found:
            mean = torch.stack(found).sum(0) / len(copies)
            for copy in copies:
                copy.grad = mean.clone()
