"""The way out: FSDP2's own hooks run the model, on the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphshard import fsdp2
from graphshard.capture import marked_classes
from graphshard.capture.unit_hooks import unit_hooks
from graphshard.fsdp2 import Unit
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext


class EagerMode:
    """Whether a model runs compiled or in eager FSDP2, and what must hold where that changes.

    Args:
        model: annotated by `fully_shard` or `replicate`.
        units: its.
        context: its.
        holdings: its.

    Attributes:
        compiled: False: FSDP2's hooks run the model.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], context: ModelContext, holdings: Holdings) -> None:
        self._units = units
        self._context = context
        self._holdings = holdings
        self._hooks = fsdp2.ForwardHooks(model, unit_hooks, marked_classes.forward_method)
        self._ran = False  # FSDP2's engine may hold gradients, also of a backward that comes later
        self.compiled = True

    def take_hooks(self) -> None:
        """Takes FSDP2's hooks off the model: graphshard runs it."""
        self._hooks.detach()

    def take_methods(self, gathered: bool) -> None:
        """Takes over methods that were registered lately. `gathered`: FSDP2's hooks have run around one."""
        for name in self._hooks.find_methods():
            if gathered and not self._ran:
                self._context.report.note_once(f"{name}, registered after compile, ran in FSDP2's hooks the first time")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, FSDP2's own hooks run the model. Gradients that are held unreduced go with it, and come back.

        Raises:
            RuntimeError: while gradients are held that are reduced over shards, but not over their copies; or
                unreduced ones, of parameters on a mesh of all axes.
        """
        if not self.compiled:
            yield
            return
        _refuse_partial("graphshard", [shard.fqn for shard in self._holdings.shards if shard.partial is not None])
        _refuse_held([shard.fqn for shard in self._holdings.shards if shard.cannot_hand_held])
        self._leave_compiled()
        try:
            yield
        finally:
            self.take_hooks()
            self.compiled = True
            self.reshard()

    def _leave_compiled(self) -> None:
        self._ran = True
        self._holdings.gathers.reshard_all()
        self._hooks.attach(self.hand_held)
        self.compiled = False
        if self._context.executed is not None:
            self._context.report.say_once("compare_every: what eager FSDP2 sends is not compared")

    def reshard(self) -> bool:
        """Frees what FSDP2's own engine left gathered; returns whether there was anything."""
        # A backward of ours, an optimizer or a state dict would take it for the parameters.
        gathered = [unit for unit in self._units if not unit.is_sharded]
        for unit in gathered:
            unit.reshard()
        return bool(gathered)

    def hand_held(self, state_id: int | None = None) -> None:
        """A backward has ended, or FSDP2 has gathered the units of a state. The next may be one of FSDP2's backwards:
        from its first use on, it holds what is unreduced between backwards, whoever computed it.
        """
        for unit, shards in self._holdings.shards.by_unit() if self._ran else ():
            if state_id in (None, unit.state_id):
                for shard in shards:
                    shard.hand_held()

    def check_partial(self) -> None:
        """Raises:
        RuntimeError: FSDP2's own engine holds gradients that are reduced over shards, but not over their copies.
        """
        if self._ran:
            _refuse_partial("eager FSDP2", [unit.name or "root" for unit in self._units if unit.holds_partial])

    def take_held(self) -> None:
        """A backward begins: takes the unreduced gradients that FSDP2's own engine holds."""
        if not self._ran:
            return
        for unit, shards in self._holdings.shards.by_unit():
            for shard in shards:
                if shard.take_held():
                    self._holdings.shards.active.add(unit)


def _refuse_partial(holder: str, names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"graphshard.eager: {holder} holds gradients of {len(names)} parameters or units ({names[0]}, ...) that "
            "are reduced over shards, but not over their copies, which the other engine cannot finish. Run one "
            "backward with set_requires_all_reduce(True) before switching"
        )


def _refuse_held(names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"graphshard.eager: graphshard holds unreduced gradients of {len(names)} parameters ({names[0]}, ...) that "
            "use dp_mesh_dims, to which the other engine cannot add. Run one backward with "
            "set_requires_gradient_sync(True) before switching"
        )


def called_eagerly(
    module: nn.Module, method: marked_classes.Method | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a module, or a registered method of it, by FSDP2's hooks: its wrapper of the method is back."""
    if method is not None:
        return getattr(module, method.name)(*args, **kwargs)
    return marked_classes.own_call(module, *args, **kwargs)
