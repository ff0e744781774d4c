"""`generate`, as of transformers, registered as a forward method."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphshard.capture.marked_classes import Method, ModelRunner
from graphshard.compat.dynamo import uncaptured
from graphshard.state.holdings import Holdings

GENERATE = "generate"


@uncaptured
def generate(
    runner: ModelRunner,
    holdings: Holdings,
    module: nn.Module,
    method: Method,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs it as plain Python: its calls of the model, one for each token, are calls like any other, compiled once.

    What is around them would be captured anew for many lengths, and by ranks at different times. As in FSDP2 the unit
    of `module` is gathered meanwhile; behind it, it is sharded if `module` itself was called, or by its flag.
    """
    called = holdings.forward.called
    called.clear()
    runner.unshard(module, async_op=False)
    try:
        return method.body(module, *args, **kwargs)
    finally:
        again = id(module) in called
        own = holdings.shards.units_of(module)
        holdings.gathers.reshard([unit for unit in own if again or unit.reshard_after_forward])
