"""The way out: FSDP2's own hooks run the model, on the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from graphshard import fsdp2
from graphshard.capture import marked_classes
from graphshard.capture.unit_hooks import unit_hooks
from graphshard.errors import UnsupportedModel
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

    def falls_back(self, reasons: Iterable[str | None], strict: bool) -> bool:
        """Leaves the model to FSDP2 for good if there is a reason, said once; else takes its hooks off.

        Raises:
            UnsupportedModel: there is a reason, and `strict`.
        """
        if (reason := next(filter(None, reasons), None)) is None:
            return False
        line = f"{reason}, which is not compiled: the model runs in eager FSDP2"
        if strict:
            raise UnsupportedModel(f"{line}; got strict=True")
        self._context.report.say_once(line)
        self._leave_compiled()
        return True

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
        """Inside, FSDP2's own hooks run the model.

        Raises:
            RuntimeError: while unreduced gradients are held, by either engine, at entry or at exit.
        """
        if not self.compiled:
            yield
            return
        _refuse_held("graphshard", self._holdings.reductions.held())
        self._leave_compiled()
        try:
            yield
        finally:
            self.take_hooks()
            self.compiled = True
            self.reshard()
            self._refuse_held_by_fsdp2()

    def _leave_compiled(self) -> None:
        self._ran = True
        self._holdings.gathers.reshard_all()
        self._hooks.attach()
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

    def check_nothing_held(self) -> None:
        """Raises:
        RuntimeError: FSDP2's own engine holds unreduced gradients.
        """
        if self._ran:
            self._refuse_held_by_fsdp2()

    def _refuse_held_by_fsdp2(self) -> None:
        _refuse_held("eager FSDP2", [unit.name or "root" for unit in self._units if unit.holds_unreduced_grads()])


def _refuse_held(holder: str, names: Sequence[str]) -> None:
    if names:
        raise RuntimeError(
            f"graphshard.eager: {holder} holds unreduced gradients of {len(names)} parameters or units "
            f"({names[0]}, ...), which the other engine cannot reduce. Run one backward with "
            "set_requires_gradient_sync(True) before switching"
        )
