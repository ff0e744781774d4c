"""Memory of parameters that were read outside any graph: autograd keeps these until backward, modules perhaps longer.

So it is emptied when the forward of their unit ends, filled again when a gradient comes to what that returned, and
emptied when they have theirs: they are the same tensors all the while. Source: FSDP2 resizes the storage of its
parameters, at the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from graphshard.compat.dynamo import uncaptured
from graphshard.compat.tensors import tensors_in
from graphshard.fsdp2 import Unit
from graphshard.state.holdings import Holdings
from graphshard.state.shards import Shard


class HandedOut(NamedTuple):
    """A parameter, full size, as code around graphs has it. Weakly: others say how long it is needed."""

    shard: Shard
    tensor: TensorWeakRef
    num_bytes: int


class _Filled:
    """What one call of a unit has read, filled for its backward; `left`: those that still wait for their gradient."""

    def __init__(self, handed: list[HandedOut]) -> None:
        self.handed = handed
        self.left = [
            found.shard for found in handed if (full := found.tensor()) is not None and full.grad_fn is not None
        ]


class ReadMemory:
    """The memory of what forwards have handed out.

    Args:
        holdings: of the model.
        gather: gathers units in backward.
    """

    def __init__(self, holdings: Holdings, gather: Callable[[frozenset[Unit]], None]) -> None:
        self._holdings = holdings
        self._gather = gather
        self._handed: dict[Unit, list[HandedOut]] = {}  # by the running forward
        self._filled: list[_Filled] = []  # in the running backward

    def hand_out(self, shard: Shard, full: Tensor) -> None:
        """Code around graphs gets `full`. It can be emptied if it is all of its memory, and no shard of this rank's."""
        memory = full.untyped_storage()
        if shard.unit.world_size > 1 and type(full) is Tensor and memory.nbytes() == full.nbytes:
            handed = HandedOut(shard, TensorWeakRef(full), full.nbytes)
            self._handed.setdefault(shard.unit, []).append(handed)

    def forget(self) -> None:
        """The forward has ended: what is left stays as it is."""
        self._handed.clear()

    def end_forward(self, units: Iterable[Unit], result: Any) -> None:
        """The forward of `units` has ended, and returned `result`: empties what was handed out of those that are
        sharded again, if there is a gradient to wait for.
        """
        ended = [unit for unit in units if unit in self._handed and self._handed[unit][0].shard.full is None]
        handed = [found for unit in ended for found in self._handed.pop(unit)]
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad] if handed else []
        if not outputs:
            return
        _empty(handed)
        for output in outputs:
            output.register_hook(partial(self._fill, handed))  # type: ignore[no-untyped-call]

    @uncaptured
    def _fill(self, handed: list[HandedOut], _: Tensor) -> None:
        self._gather(frozenset(found.shard.unit for found in handed))
        if any(filled.handed is handed for filled in self._filled):  # for another output
            return
        for found in handed:
            tensor, shard = found.tensor(), found.shard
            if tensor is None or shard.full is None:
                continue
            memory, gathered = tensor.untyped_storage(), shard.as_seen(shard.full)
            if memory.data_ptr() == gathered.untyped_storage().data_ptr():
                continue
            memory.resize_(found.num_bytes)
            alias = tensor.data  # counts its own writes
            alias.copy_(gathered)
            if gathered is shard.full:  # of which one copy is enough
                shard.stay(alias)
        self._filled.append(_Filled(handed))

    def gradient_came(self, shard: Shard) -> None:
        """A parameter that was read has its gradient: nothing needs it any more in the backward of that call."""
        filled = next((filled for filled in self._filled if shard in filled.left), None)
        if filled is None:
            return
        filled.left.remove(shard)
        if filled.left:
            return
        for unit in {found.shard.unit for found in filled.handed}:
            calls = self._holdings.calls.sharing([unit])
            if unit.reshard_after_backward and not any(call.follows() for call in calls):
                self._holdings.gathers.reshard([unit])
        _empty(found for found in filled.handed if found.shard.full is None)

    def end_backward(self) -> None:
        """A backward has ended: empties what has got no gradient; another one may come for it."""
        ended, self._filled = self._filled, []
        _empty(found for filled in ended for found in filled.handed if found.shard.full is None)


def _empty(handed: Iterable[HandedOut]) -> None:
    for found in handed:
        if (tensor := found.tensor()) is not None:
            tensor.untyped_storage().resize_(0)
