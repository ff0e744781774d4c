"""Did the model really run as compiled programs, with how many launches? Agreement with eager does not say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.testing.compare import ParityError
from graphshard.testing.launches import COLLECTIVES

Launches = dict[str, int]
Expected = Literal["equal", "at_most"] | None


def reported_launches(model: nn.Module) -> Launches:
    """Launches of a compiled model so far, by its own report."""
    counts = graphshard.report(model).collectives
    return {name: counts.get(name, 0) for name in COLLECTIVES}


def check_ran_compiled(model: nn.Module, *, train: bool, allow_eager: Sequence[str] = ()) -> None:
    """Checks that forwards and backwards ran as programs and that nothing else ran eagerly.

    Args:
        model: compiled.
        train: backward programs are wanted too.
        allow_eager: what may run outside programs: a part of each such FQN or line.

    Raises:
        ParityError: otherwise.
    """
    report = graphshard.report(model)
    ran = {program.direction for program in report.programs if program.runs > 0}
    built = [f"{p.direction} of region {p.region}: {p.runs} runs" for p in report.programs]
    wanted = {"forward", "backward"} if train else {"forward", "inference"}
    if not (wanted <= ran if train else wanted & ran):
        names = " and " if train else " or "
        raise ParityError(
            f"rank {dist.get_rank()}: the model did not run compiled: got programs {built}, want runs of "
            f"{names.join(sorted(wanted))}. Fallbacks: {list(report.fallbacks)}"
        )
    outside = [f"{fqn} gathered eagerly {count} times" for fqn, count in report.eager_unshards.items()]
    outside += [f"{fqn} reduced eagerly {count} times" for fqn, count in report.eager_reductions.items()]
    outside += report.fallbacks
    silent = [line for line in outside if not any(allowed in line for allowed in allow_eager)]
    if silent:
        raise ParityError("\n  ".join([f"rank {dist.get_rank()}: ran outside compiled programs:", *silent]))


def check_measured(reported: Sequence[Launches], measured: Sequence[Launches | None]) -> None:
    """Checks that a report counts what was really launched, in each step that was measured.

    Raises:
        ParityError: otherwise.
    """
    for step, (ours, seen) in enumerate(zip(reported, measured, strict=True)):
        if seen is not None and ours != seen:
            raise ParityError(
                f"launches of the compiled model, step {step}, rank {dist.get_rank()}: report(model).collectives grew "
                f"by {ours}, the profiler saw {seen}"
            )


def check_launches(compiled: Sequence[Launches], eager: Sequence[Launches], expected: Expected) -> None:
    """Compares the launches of each step with eager FSDP2's.

    Raises:
        ParityError: for the first step that has other launches than `expected` allows.
    """
    if expected is None:
        return
    for step, (got, want) in enumerate(zip(compiled, eager, strict=True)):
        for name in COLLECTIVES:
            fewer_is_fine = expected == "at_most" and name == "all_gather"
            if got[name] != want[name] and not (fewer_is_fine and got[name] < want[name]):
                raise ParityError(
                    f"{name} launches, step {step}, rank {dist.get_rank()}: got {got[name]}, "
                    f"want {'at most ' if fewer_is_fine else ''}{want[name]} as in eager FSDP2"
                )
