"""What Dynamo compiles of a model: one function for each kind of module that is called from outside any graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from graphshard.capture import marked_classes
from graphshard.capture.entry_code import entry_point
from graphshard.capture.marking import hook_keys, shared_code_key
from graphshard.compat.dynamo import (
    BackendCompilerFailed,
    TorchDynamoException,
    capture_settings,
    without_dynamic_marks,
)
from graphshard.compat.interpreter import with_room
from graphshard.compat.modules import child_modules
from graphshard.compat.recorded_outputs import register_recorders
from graphshard.errors import RanksDiffer, TwinsMoved, UnsupportedModel
from graphshard.faults import note_compiles
from graphshard.plan_file import PlanMismatch
from graphshard.planner import BudgetTooSmall
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.runtime.symbolic import SizesDiffer, SymbolicTraceFailed


@dataclass(frozen=True)
class Options:
    """How a model is compiled: the arguments of `graphshard.compile` that matter after sharding."""

    backend: str = "inductor"
    regions: str = "model"
    fullgraph: bool = False
    dynamic: bool | None = None
    strict: bool = False
    compare_every: int | None = None


class EntryPoints:
    """The compiled functions of one model.

    Args:
        model: with marked classes.
        options: how to compile it.
        backend: for Dynamo.
        runtime: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        backend: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
        runtime: ModelRuntime,
    ) -> None:
        self._report = runtime.context.report
        self._static: set[object] = set()
        self._twins = runtime.twins
        self._holdings, self._forward = runtime.holdings, runtime.holdings.forward
        self._options, self._dynamic = options, options.dynamic
        runtime.capture_each_size = self.capture_each_size
        self._backend = backend
        self._model = model
        self._modules: list[nn.Module] = []
        self._tables: list[dict[str, nn.Module | None]] = []
        self._children: list[nn.Module | None] = []
        self._hook_keys: list[int] = []
        self._kinds: dict[int, object] = {}  # by module
        self._functions: dict[object, Callable[..., Any]] = {}
        self.outer: frozenset[int] = frozenset()

    def refresh(self) -> bool:
        """Looks which modules and hooks there are now, and which blocks are alike: all are part of what is compiled.

        Returns:
            Whether hooks are others than before.
        """
        children = self._children_now()
        if (
            others := not self._modules
            or len(children) != len(self._children)
            or any(map(is_not, children, self._children))
        ):
            register_recorders(self._model)
            self._modules = list(self._model.modules())
            opens = (module for module in self._modules if not isinstance(module, torch.jit.ScriptModule))
            self._tables = [child_modules(module) for module in opens]
            self._children = self._children_now()
        if changed := self._hook_keys != (keys := hook_keys(self._modules)):
            self._hook_keys = keys
        if others or changed:
            self._kinds.clear()
        self._twins.refresh(changed)
        return changed

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def call(
        self, module: nn.Module, method: marked_classes.Method | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module, or a registered method of it, compiled; with a region per unit, what is around them is
        plain Python, and so is a module that other values than its parameters are given to.
        """
        if method is None and self._options.regions == "unit" and id(module) in self.outer:
            return marked_classes.own_call(module, *args, **kwargs)
        inside = self._forward.nested or self._forward.in_backward
        if method is None and inside and self._holdings.shards.has_other_values(module):
            for unit in self._holdings.shards.units_of(module):
                raise UnsupportedModel(
                    f"forward calls '{unit.name}' with other values than its parameters (torch.func.functional_call), "
                    "and FSDP2 puts its own in their place, as before the forward of each unit; want it to be no unit"
                )
            return marked_classes.own_call(module, *args, **kwargs)
        if (kind := self._kinds.get(id(module))) is None:
            kind = self._kinds[id(module)] = shared_code_key(module)
        note_compiles()
        runs = self._forward.regions_run
        try:
            with capture_settings():
                try:
                    return self._function(module, kind, method)(module, args, kwargs)
                except TwinsMoved:
                    if self._forward.regions_run != runs:
                        raise
                except SizesDiffer as differ:
                    if self._forward.regions_run != runs:
                        raise SizesDiffer(f"{differ}; want dynamic=False") from None
                    self.capture_each_size(str(differ))
                    without_dynamic_marks(args, kwargs)
                except BackendCompilerFailed as error:
                    failed = error.inner_exception
                    if not isinstance(failed, SymbolicTraceFailed) or self._forward.regions_run != runs:
                        raise
                    if self._dynamic is not None or not self._make_static(module, kind, method, failed):
                        raise
                    without_dynamic_marks(args, kwargs)
                return with_room(self._function(module, kind, method), module, args, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, (PlanMismatch, BudgetTooSmall, RanksDiffer, UnsupportedModel)):
                raise error.inner_exception from None
            raise
        except TorchDynamoException as error:
            if "differentiated Tensor" not in str(error):
                raise
            raise UnsupportedModel(
                "forward asks for gradients (torch.autograd.grad), or the backward of a torch.autograd.Function does, "
                "of a parameter that it reads elsewhere, or for which nothing was computed: each read is a tensor of "
                "its own; want one read (weight = self.weight) for both, or calls in graphshard.eager(model)"
            ) from error

    def _make_static(
        self, module: nn.Module, kind: object, method: marked_classes.Method | None, failed: SymbolicTraceFailed
    ) -> bool:
        """From now on captures each size and number by itself; returns False if that was so already."""
        if (kind, method) in self._static:
            return False
        self._static.add((kind, method))
        self._functions[kind, method] = self._compiled(module, method, dynamic=False)
        self._report.note_once(
            f"{type(module).__name__.removeprefix('FSDP')}: {failed}: each is captured by itself, as with dynamic=False"
        )
        return True

    def capture_each_size(self, why: str) -> None:
        """The same of all, from the next call on, and of what Dynamo has captured so far: it keeps apart what it
        captures with another `dynamic`.
        """
        if self._dynamic is not False:
            self._dynamic = False
            self._functions.clear()
            self._report.note_once(f"{why}: from now on each size is captured by itself, as with dynamic=False")

    def _function(self, module: nn.Module, kind: object, method: marked_classes.Method | None) -> Callable[..., Any]:
        if (function := self._functions.get((kind, method))) is not None:
            return function
        function = self._functions[kind, method] = self._compiled(module, method, self._dynamic)
        return partial(with_room, function)

    def _compiled(
        self, module: nn.Module, method: marked_classes.Method | None, dynamic: bool | None
    ) -> Callable[..., Any]:
        body = marked_classes.own_call if method is None else method.body
        return torch.compile(
            entry_point(type(module), body),
            backend=self._backend,
            fullgraph=self._options.fullgraph,
            dynamic=dynamic,
        )
