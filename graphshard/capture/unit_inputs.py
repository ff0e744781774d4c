"""What enters a unit enters by an alias: backward sums what the unit adds to its gradient, then adds that to what
others add. In FSDP2 an autograd function of the unit's pre-forward hook has that effect, and sums in floating point
depend on it. What a unit does not use gets zeros there, and nothing here.

`passes.sum_by_units` takes away the aliases that change no sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.compat.dynamo import inline_only
from graphshard.graph.ir import ALIAS


@inline_only
def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with an alias of each tensor that needs a gradient; lists and dicts stay what they are.

    The first is made last, so that backward comes to it first, as it does in FSDP2.
    """
    names = list(kwargs)[::-1]
    values = [_entering(kwargs[name]) for name in names]
    return _entering(args), dict(zip(names[::-1], values[::-1], strict=True))


@inline_only
def _entering(value: Any) -> Any:
    if type(value) is Tensor or type(value) is nn.Parameter or type(value) is DTensor:
        return ALIAS(value) if value.requires_grad else value
    if type(value) is tuple:
        return tuple([_entering(item) for item in value[::-1]][::-1])
    return value
