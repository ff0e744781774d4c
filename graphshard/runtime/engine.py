"""The engine of one compiled model: its shards, the way it runs now, and what happened so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import UnshardHandle

from graphshard import env, fsdp2
from graphshard.agree.consensus import contracts_of
from graphshard.agree.executed import executed_of
from graphshard.capture import marked_classes
from graphshard.capture.casts import cast_hooks
from graphshard.capture.marking import hook_keys, mark_classes, shared_code_key
from graphshard.compat.autograd import backward_id, call_at_end_of_backward
from graphshard.compat.dynamo import BackendCompilerFailed, uncaptured
from graphshard.compat.modules import module_call
from graphshard.compat.tensors import dispatch_mode_active, moved_tensors
from graphshard.errors import RanksDiffer, UnsupportedModel
from graphshard.following.follower import Follower
from graphshard.fsdp2 import Unit
from graphshard.graph import user_comms
from graphshard.lowering import driver
from graphshard.plan_file import PlanMismatch
from graphshard.planner import BudgetTooSmall
from graphshard.planning.planning import Planning
from graphshard.reporting.report import ProgramRecord, Report
from graphshard.runtime.backend import make_backend
from graphshard.runtime.outside import OutsideGathers
from graphshard.runtime.prefetch import Prefetch
from graphshard.runtime.rest import rest_of_contracts
from graphshard.state.dispatch import Binding
from graphshard.state.holdings import Holdings
from graphshard.state.shards import ParameterWatch, Shard
from graphshard.state.unit_programs import UnitPrograms

_numbers = itertools.count()


@dataclass(frozen=True)
class Options:
    """How a model is compiled: the arguments of `graphshard.compile` that matter after sharding."""

    backend: str = "inductor"
    regions: str = "model"
    fullgraph: bool = False
    dynamic: bool | None = None
    strict: bool = False
    compare_every: int | None = None


class Engine:
    """Runs an annotated model compiled, or hands it to FSDP2's own hooks.

    Args:
        model: annotated by `fully_shard` or `replicate`.
        options: how to compile it.
        planning: plans its programs; None: they are as in FSDP2.
    """

    def __init__(self, model: nn.Module, options: Options, planning: Planning | None = None) -> None:
        self.model = model
        self.planning = planning
        # For dumps: models are compiled in the same order on every rank.
        self.name = f"{type(model).__name__.removeprefix('FSDP').removeprefix('Replicate')}{next(_numbers)}"
        self.options = options
        self.report = Report()
        self.running = False
        self.compiled = True  # False: FSDP2's hooks run the model
        self.bindings: dict[tuple[int, str, tuple[int, ...]], Binding] = {}
        self.shard_at: dict[int, Shard] = {}
        self.units = fsdp2.find_units(model)
        self.contracts = contracts_of(self.name, sorted({rank for unit in self.units for rank in unit.ranks}))
        self.executed = executed_of(self.name, options.compare_every, self.units, self.contracts)
        programs = UnitPrograms(self)
        self.holdings = Holdings(programs, self.report)
        by_unit = options.regions == "unit"
        self.prefetch = Prefetch(self.holdings, self.report, by_unit, self.name, self.contracts, planning)
        has_contracts = options.backend != "eager" and planning is not None
        self.follower = Follower(self, has_contracts and not by_unit, has_contracts)
        self._rest = rest_of_contracts(self)
        self._outside = OutsideGathers(programs, self.holdings.active, self.backward_runs, self.follower)
        self._eager_ran = False  # FSDP2's engine may hold gradients, also of a backward that comes later
        self._ready = False
        self._shards: list[Shard] = []
        self._event: Any = None
        self.deferred: list[Callable[[], None]] | None = None  # halves of backwards, for a pipeline's schedule
        self._backward_id = -1
        self._ending: frozenset[Unit] = frozenset()
        self._entries: dict[object, Callable[..., Any]] = {}
        self._modules = list(model.modules())
        self._hook_keys: list[int] = []
        self._unit_modules = fsdp2.unit_modules(model)
        self._sizes: list[int] = []
        self._signatures: dict[int, object] = {}
        for name in sorted(env.disabled_passes(driver.OPTIONAL)):
            self.report.say_once(f"pass {name} is left out, as GRAPHSHARD_DISABLE says")
        self._backend = make_backend(self, options.backend)
        for position, unit in enumerate(self.units):
            unit.key, unit.position = f"{self.name}:{unit.name}", position
            user_comms.register(unit.key, unit)
        self._hooks = fsdp2.ForwardHooks(model, cast_hooks, marked_classes.forward_method)
        if not self._falls_back(unit.unsupported() for unit in self.units):
            self._outer = mark_classes(self, self._unit_modules)
            self._hooks.detach()

    def chooses_kept(self, units: frozenset[Unit]) -> bool:
        """Whether it is planned which of `units` stay gathered from forward to backward."""
        return self.planning is not None and self.planning.mode != "fsdp2" and self.is_whole(units)

    @property
    def shards(self) -> Sequence[Shard]:
        """Of all parameters, once they are known."""
        return self._shards

    def is_whole(self, units: frozenset[Unit]) -> bool:
        """Whether `units` are all of the model's that have parameters."""
        return units.issuperset(unit for unit in self.units if unit.params)

    # -- set-up

    def _falls_back(self, reasons: Iterable[str | None]) -> bool:
        """Leaves the model to FSDP2 if there is a reason: said once, an error if `strict`."""
        if (reason := next(filter(None, reasons), None)) is None:
            return False
        line = f"{reason}, which is not compiled: the model runs in eager FSDP2"
        if self.options.strict:
            raise UnsupportedModel(f"{line}; got strict=True")
        self.report.say_once(line)
        self._leave_compiled()
        return True

    def _prepare(self) -> None:
        """Makes ready for a forward, or for gathering by hand."""
        if self._eager_ran:
            self._refuse_held_by_fsdp2()
        if not self._ready:
            fsdp2.lazy_init(self.model)
            for unit in self.units:
                names = fsdp2.parameter_names(self.model, unit.params)
                for index, (param, fqn) in enumerate(zip(unit.params, names, strict=True)):
                    self._shards.append(Shard(param, unit, fqn, index, self.report))
            self._install()
            self._ready = True
        elif self._watch.changed():
            for shard in self._shards:
                shard.renew()
            self._install()
        gathered = self._reshard_fsdp2()  # around a method registered lately, or by a backward of an eager forward
        sizes = [len(vars(module)) for module in self._unit_modules]
        if gathered or sizes != self._sizes:  # a method may have been registered since the last call
            self._sizes = sizes
            for name in self._hooks.find_methods():
                if gathered and not self._eager_ran:
                    self.report.note_once(f"{name}, registered after compile, ran in FSDP2's hooks the first time")
        if self._hook_keys != (keys := hook_keys(self._modules)):
            self._hook_keys = keys
            self._signatures.clear()

    def _install(self) -> None:
        """Puts the leaves where properties and programs find them."""
        self._watch = ParameterWatch(self._shards)
        self.shard_at = {shard.leaf.data_ptr(): shard for shard in self._shards}
        self.bindings.clear()  # addresses mean nothing any more
        self.holdings.install(self._shards)
        for shard in self._shards:
            for module, name in shard.param.owners:
                module.__dict__[marked_classes.SHARDS][name] = shard.marker_args()

    # -- calls

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a marked module: compiled, or by FSDP2's hooks while these are on."""
        return self._call(module, None, args, kwargs)

    def call_method(
        self, module: nn.Module, method: marked_classes.Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a registered forward method of a marked module likewise."""
        return self._call(module, method, args, kwargs)

    @uncaptured
    def _call(
        self, module: nn.Module, method: marked_classes.Method | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.compiled:
            return module_call(module, *args, **kwargs)
        if self.running:
            self.holdings.nested = True
            try:
                return self._enter(module, method, args, kwargs)
            finally:
                for unit in self._units_of(module):
                    if self.follower.may_end(unit):
                        self.holdings.end_unit(unit)
        if dispatch_mode_active():
            self.report.say_once("a call under a TorchDispatchMode ran in eager FSDP2")
            with self.eager():
                if method is not None:  # FSDP2's wrapper of it is back
                    return getattr(module, method.name)(*args, **kwargs)
                return module_call(module, *args, **kwargs)
        self._prepare()
        if self.executed is not None:
            self.executed.begin_call()
        if self.units and self.units[0].device.type != "cpu":
            args, kwargs = self._moved_to_device(args, kwargs)
        self.running = True
        self.holdings.begin_forward(module)
        self.follower.begin_forward(module)
        try:
            with marked_classes.tracing(), self.prefetch.forward():
                result = self._enter(module, method, args, kwargs)
                self._rest.finish_forward()
                return result
        finally:
            self.running = False
            self._outside.clear()
            self.holdings.end_forward()

    def _moved_to_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the model's device, as FSDP2's root moves them, behind the event that stands for the optimizer."""
        device = self.units[0].device
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
            self._event = None

        return moved_tensors(args, device), moved_tensors(kwargs, device)

    def _enter(
        self, module: nn.Module, method: marked_classes.Method | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if method is None and self.options.regions == "unit" and id(module) in self._outer:
            return module_call(module, *args, **kwargs)
        if (key := self._signatures.get(id(module))) is None:
            key = self._signatures[id(module)] = shared_code_key(module)
        if (entry := self._entries.get((key, method))) is None:
            body = module_call if method is None else method.body
            entry = self._entries[key, method] = torch.compile(
                marked_classes.entry_point(type(module), body),
                backend=self._backend,
                fullgraph=self.options.fullgraph,
                dynamic=self.options.dynamic,
            )
        try:
            return entry(module, args, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, (PlanMismatch, BudgetTooSmall, RanksDiffer)):
                raise error.inner_exception from None
            raise

    @uncaptured
    def unshard_outside(self, module: nn.Module, name: str) -> Tensor:
        """Gathers one parameter in the middle of a forward that no graph covers, once per forward."""
        entry = module.__dict__[marked_classes.SHARDS][name]
        shard = self.shard_at[entry[0].data_ptr()]
        self.touched([shard.unit])
        if not self._rest.bring(shard):
            self.holdings.gather_wholes(self.holdings.wanted_whole(frozenset([shard.unit]), broken=True))
        owner = shard.fqn.rpartition(".")[0] or "the root"
        self.report.say_once(f"{owner} reads parameters outside any graph: they are gathered and reduced there")
        full = self._outside.gather(shard, self.running)
        return full if len(entry) == 2 else marked_classes.as_tensor_parallel(full, *entry[2:])

    def gather_in_graph(self, leaf: Tensor, forward: ProgramRecord, backward: ProgramRecord) -> Tensor:
        """Gathers one parameter for a graph that runs uncompiled, once per forward."""
        shard = self.shard_at[leaf.data_ptr()]
        self.touched([shard.unit])
        # Not kept when a checkpoint is recomputed in backward: nothing would free it.
        return self._outside.gather(shard, self.running, forward, backward)

    def touched(self, units: Sequence[Unit]) -> None:
        """Is told that the running forward uses `units`: what is gathered by hand must have arrived."""
        self.holdings.touched.update(units)
        self.holdings.finish_gathers(units)

    # -- FSDP2's methods (see `capture`)

    @uncaptured
    def unshard(self, module: nn.Module, async_op: bool) -> UnshardHandle | None:
        """`FSDPModule.unshard`: gathers a unit's parameters, which stay until `reshard`, a forward or a backward."""
        self._prepare()
        handle = self.holdings.unshard(self._units_of(module))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, module: nn.Module) -> None:
        """`FSDPModule.reshard`."""
        self.holdings.reshard(self._units_of(module))

    def reshard_all(self) -> None:
        """Frees all parameters that stay gathered: a state dict holds shards."""
        self.holdings.reshard_all()

    def reset_iter_state(self) -> None:
        """`FSDPModule.reset_iter_state`: forgets what a failed step left behind."""
        self.running = False
        self._outside.clear()
        self.holdings.reset()

    def reduce_held(self) -> None:
        """Reduces what earlier backwards left unreduced, now."""
        self.holdings.end_backward()

    def wait_for_optimizer(self, event: Any) -> None:
        """`FSDPModule.set_post_optim_event`."""
        self._event = event

    def _units_of(self, module: nn.Module) -> list[Unit]:
        return [unit for unit in self.units if any(own is module for own in unit.modules)]

    # -- backward

    def defer_weights(self) -> Callable[[], Callable[[], None]]:
        """From now on backward computes gradients of inputs only; what is returned yields the rest of it, so far."""
        self.deferred = []

        def take() -> Callable[[], None]:
            halves, self.deferred = self.deferred or [], []

            def run() -> None:
                while halves:
                    halves.pop(0)()

            return run

        return take

    def backward_runs(self, only: frozenset[Unit] = frozenset()) -> None:
        """Sees to it that what is held is looked at when the running backward ends.

        Args:
            only: units that it ends, of a list of modules that was called in parts; empty: all.
        """
        if (number := backward_id()) != self._backward_id:
            self._backward_id, self._ending = number, only
            call_at_end_of_backward(self._end_backward)
        self._ending = self._ending | only if only and self._ending else frozenset()

    def _end_backward(self) -> None:
        self._backward_id = -1
        self._rest.finish_backward()
        self.holdings.end_backward(self._ending)

    # -- engines

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, FSDP2's own hooks run the model.

        Raises:
            RuntimeError: while unreduced gradients are held, by either engine, at entry or at exit.
        """
        if not self.compiled:
            yield
            return
        self._refuse_held("graphshard", self.holdings.unreduced())
        self._leave_compiled()
        try:
            yield
        finally:
            self._return_compiled()

    def _leave_compiled(self) -> None:
        self._eager_ran = True
        self.holdings.reshard_all()
        self._hooks.attach()
        self.compiled = False
        if self.executed is not None:
            self.report.say_once("compare_every: what eager FSDP2 sends is not compared")

    def _return_compiled(self) -> None:
        self._hooks.detach()
        self.compiled = True
        self._reshard_fsdp2()
        self._refuse_held_by_fsdp2()

    def _reshard_fsdp2(self) -> bool:
        """Frees what FSDP2's own engine left gathered; returns whether there was anything."""
        # A backward of ours, an optimizer or a state dict would take it for the parameters.
        gathered = [unit for unit in self.units if not unit.is_sharded]
        for unit in gathered:
            unit.reshard()
        return bool(gathered)

    def _refuse_held_by_fsdp2(self) -> None:
        self._refuse_held("eager FSDP2", [unit.name or "root" for unit in self.units if unit.holds_unreduced_grads()])

    def _refuse_held(self, holder: str, names: Sequence[str]) -> None:
        if names:
            raise RuntimeError(
                f"graphshard.eager: {holder} holds unreduced gradients of {len(names)} parameters or units "
                f"({names[0]}, ...), which the other engine cannot reduce. Run one backward with "
                "set_requires_gradient_sync(True) before switching"
            )
