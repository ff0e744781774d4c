"""`generate`, as of transformers, registered as a forward method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from graphshard.reporting.report import Report
from graphshard.state.holdings import Holdings

T = TypeVar("T")

GENERATE = "generate"


def generate(
    report: Report, holdings: Holdings, module: nn.Module, call: Callable[[], T], forget: Callable[[], None]
) -> T:
    """Runs it as plain Python: its calls of the model, one for each token, are calls like any other, compiled once.

    What is around them would be captured anew for many lengths, and by ranks at different times. As in FSDP2 the unit
    of `module` is gathered meanwhile; behind it, it is sharded if `module` itself was called, or by its flag.

    Args:
        report: of the model.
        holdings: of the model.
        module: whose method it is.
        call: the method, with its arguments.
        forget: is called if it fails.
    """
    report.note_once(f"{GENERATE} runs as plain Python; its calls of the model, or of modules inside, are compiled")
    forward, pinned = holdings.forward, holdings.residency.pinned
    own = [unit for unit in holdings.shards.units_of(module) if unit not in pinned]
    holdings.gathers.unshard(own).wait()
    outer, forward.called = forward.called, set()
    holdings.residency.pinned |= {*own}
    try:
        return call()
    except BaseException:
        forget()
        raise
    finally:
        holdings.residency.pinned -= {*own}
        again = id(module) in forward.called
        holdings.gathers.reshard([unit for unit in own if again or unit.reshard_after_forward])
        forward.called |= outer
