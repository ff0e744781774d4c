"""The engine of one compiled model: what its modules call, and the parts that serve them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from graphshard import env, fsdp2
from graphshard.agree.consensus import consensus_of
from graphshard.agree.executed import executed_of
from graphshard.agree.left_out import LeftOut
from graphshard.capture import marked_classes
from graphshard.capture.marking import mark_classes
from graphshard.capture.parameters_in_forward import FORWARD, UnitForward
from graphshard.capture.twins import Twins, candidates
from graphshard.compat.autograd import recomputes
from graphshard.compat.dynamo import inline_only, uncaptured
from graphshard.compat.modules import own_parameters
from graphshard.compat.tensors import is_selective, moved_tensors, seen_by
from graphshard.errors import UnsupportedModel
from graphshard.following.follower import Follower
from graphshard.graph import user_comms
from graphshard.lowering import driver
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report
from graphshard.runtime.backend import make_backend
from graphshard.runtime.contract_rest import rest_of_contracts
from graphshard.runtime.eager_mode import EagerMode, called_eagerly
from graphshard.runtime.entry_points import EntryPoints, Options
from graphshard.runtime.generating import GENERATE, generate
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.runtime.outside_reads import OutsideReads
from graphshard.runtime.prefetch import Prefetch
from graphshard.runtime.read_memory import ReadMemory
from graphshard.runtime.running_backward import RunningBackward
from graphshard.runtime.selective import recomputing_all
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext
from graphshard.state.shard_table import ShardTable, class_of
from graphshard.state.unit_programs import UnitPrograms

_numbers = itertools.count()
_engines: WeakValueDictionary[str, Engine] = WeakValueDictionary()


def model_contexts() -> list[ModelContext]:
    """Of all models that this process has compiled and not deleted, in the order of `compile`."""
    return [engine.context for engine in list(_engines.values())]


class Engine:
    """Runs an annotated model compiled, or hands it to FSDP2's own hooks.

    Args:
        model: annotated by `fully_shard` or `replicate`.
        options: how to compile it.
        planning: plans its programs; None: they are as in FSDP2.

    Attributes:
        units: of the model.
        context: its name, its report, and what its ranks share.
        shards: of the model; none before its first call.
        holdings: what they hold between programs.
        backward: that runs.
    """

    table_class = ShardTable

    def __init__(self, model: nn.Module, options: Options, planning: Planning | None = None) -> None:
        self.model = model
        self.options = options
        self.units = fsdp2.sharded_units(model)
        self.context = context = self._make_context(planning)
        self.shards = self.table_class(model, self.units, context.report)
        self._programs = UnitPrograms(context)
        self.holdings = Holdings(self.shards, self._programs, context.report)
        self.backward = RunningBackward(self.holdings.reductions, self.holdings.calls, context.report)
        by_unit, has_contracts = options.regions == "unit", options.backend != "eager" and planning is not None
        self._follower = Follower(context, self.holdings, has_contracts and not by_unit, has_contracts)
        self._prefetch = Prefetch(context, self.holdings, by_unit)
        self._memory = ReadMemory(self.holdings, self._gather_in_backward)
        self._outside = OutsideReads(
            self._programs, self.holdings, self.backward.runs, self._follower, self._memory, context.report
        )
        self._unit_modules = fsdp2.unit_modules(model)
        blocks = candidates(self._unit_modules) if (asked := env.traces_twins()) is not False else []
        if blocks and by_unit:
            blocks = []
            if asked:
                context.report.say_once("GRAPHSHARD_TWINS is ignored: with regions='unit' each block is a region")
        self.twins = Twins(model, blocks, context.report.note_once)
        self._runtime = ModelRuntime(
            context, self.holdings, self._prefetch, self._follower, self.backward, self._outside, self.twins
        )
        self._rest = rest_of_contracts(self._runtime)
        self.backward.finish = self._rest.finish_backward
        self._outside.bring = self._rest.bring
        self._optimizer_event: Any = None
        self._knows_units = True
        self._sizes: list[int] = []  # of what these modules have: a method may have been registered
        backend = make_backend(self._runtime, options.backend, options.fullgraph)
        self._entries = EntryPoints(model, options, backend, self._runtime)
        for position, unit in enumerate(self.units):
            unit.key, unit.position = f"{context.name}:{unit.name}", position
            user_comms.register(unit.key, unit)
        self._eager = EagerMode(model, self.units, context, self.holdings)
        self.shards.grad_came = self.backward.runs
        self.has_other_values, self.put_back = self.shards.has_other_values, self._outside.put_back
        self.backward.begin, self.backward.end = self._eager.take_held, self._end_backward
        self._entries.outer = mark_classes(self, context.name, self.units, self._unit_modules, blocks)
        self._eager.take_hooks()
        _engines[context.name] = self

    def _make_context(self, planning: Planning | None) -> ModelContext:
        # For dumps: models are compiled in the same order on every rank.
        name = f"{type(self.model).__name__.removeprefix('FSDP').removeprefix('Replicate')}{next(_numbers)}"
        consensus = consensus_of(name, sorted({rank for unit in self.units for rank in unit.ranks}))
        executed = executed_of(name, self.options.compare_every, self.units, consensus)
        report = Report()
        for disabled in sorted(env.disabled_passes(driver.OPTIONAL)):
            report.say_once(f"pass {disabled} is left out, as GRAPHSHARD_DISABLE says")
        left_out = LeftOut(consensus, env.verify_level() >= driver.RUNS and not self.options.strict)
        return ModelContext(name, report, consensus, left_out, executed, planning, self.options.strict)

    @property
    def running(self) -> bool:
        """Whether a forward runs."""
        return self.holdings.forward.runs

    @property
    def reads_gathered(self) -> bool:
        """Whether what reads a parameter now, outside any graph, is a forward, or one that a checkpoint recomputes."""
        return self.running or (self.compiled and recomputes())

    @property
    def compiled(self) -> bool:
        """Whether graphshard runs the model; else FSDP2's hooks do."""
        return self._eager.compiled

    def _prepare(self) -> None:
        """Makes ready for a forward, or for gathering by hand."""
        if self.shards.refresh():
            self._programs.clear()
        self._eager.check_partial()
        self.backward.begin_forward()
        gathered = self._eager.reshard()  # around a method registered lately, or by a backward of an eager forward
        sizes = [len(vars(module)) for module in self._unit_modules]
        if gathered or sizes != self._sizes:  # a method may have been registered since the last call
            self._sizes = sizes
            self._eager.take_methods(gathered)
        self.shards.refresh_extensions(self.holdings.gathers.is_under_way)
        if self._entries.refresh() or not self._knows_units:
            self._check_annotation()

    def _check_annotation(self) -> None:
        self._knows_units = False
        known = {id(module) for module in self._unit_modules}
        for name, module in self.model.named_modules():
            if isinstance(module, FSDPModule) and id(module) not in known:
                raise RuntimeError(
                    f"{self.context.name}: module '{name}' was given to fully_shard after graphshard.compile, which "
                    "has no program for it; want every fully_shard before graphshard.compile"
                )
        self._knows_units = True

    @inline_only
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a marked module: compiled, or by FSDP2's hooks while these are on."""
        return self._call(module, None, args, kwargs)

    @inline_only
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
            return called_eagerly(module, method, args, kwargs)
        if is_selective():
            with recomputing_all(self.context.report):
                return self._call(module, method, args, kwargs)
        if self.running:
            return self._call_inside(module, method, args, kwargs)
        if (seer := seen_by()) is not None:
            if self.options.strict:
                raise UnsupportedModel(
                    f"{type(module).__name__}: a call under {seer} would run in eager FSDP2; got strict=True, want "
                    "none around it"
                )
            self.shards.check_registered()  # by functional_call, whose values FSDP2's hooks would overwrite
            self.context.report.say_once(f"a call under {seer} ran in eager FSDP2")
            with self.eager():
                return called_eagerly(module, method, args, kwargs)
        self._await_optimizer()
        self._prepare()
        if self.units and (device := self.units[0].device).type != "cpu":  # as FSDP2's root moves them
            args, kwargs = moved_tensors(args, device), moved_tensors(kwargs, device)
        if method is not None and method.name == GENERATE:
            call = partial(method.body, module, *args, **kwargs)
            return generate(self.context.report, self.holdings, module, call, self._forget_forward)
        if self.context.executed is not None:
            self.context.executed.begin_call()
        self._begin_forward(module)
        try:
            with marked_classes.tracing(), self._prefetch.orders.forward(), self._unit_as_in_forward(module):
                result = self._entries.call(module, method, args, kwargs)
                self._rest.finish_forward()
            self.holdings.end_forward()
            self._outside.end(self.units, result)
            return result
        except BaseException:
            self._forget_forward()
            raise
        finally:
            self._end_forward()

    @contextmanager
    def _unit_as_in_forward(self, module: nn.Module) -> Iterator[None]:
        """A checkpoint may recompute a part of a unit's forward, without the unit's call: its parameters are there."""
        forward: UnitForward | None = module.__dict__.get(FORWARD)
        if forward is None or not self.holdings.forward.in_backward:
            yield
            return
        before, forward.runs = forward.runs, forward.model
        try:
            yield
        finally:
            forward.runs = before

    def _begin_forward(self, module: nn.Module) -> None:
        self.holdings.begin_forward(module)
        self._follower.begin_forward(module)

    def _end_forward(self) -> None:
        self.holdings.forward.runs = False
        self._outside.clear()
        self.holdings.end_forward()

    def _forget_forward(self) -> None:
        """A forward has failed: no backward uses what it gathered. A checkpoint's, in backward, ends by an error."""
        for unit_module in self._unit_modules:
            unit_module.__dict__[FORWARD].runs = ""
        if not self.holdings.forward.in_backward:
            self.holdings.forward.touched.clear()
            self.holdings.gathers.reshard_all()

    def _call_inside(
        self, module: nn.Module, method: marked_classes.Method | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call inside the running forward, outside any graph."""
        self.holdings.forward.nested = True
        units = self.shards.units_of(module)
        try:
            result = self._entries.call(module, method, args, kwargs)
        finally:
            for unit in units:
                if self._follower.may_end(unit):
                    self.holdings.end_module(unit, module)
        self._outside.end(units, result)
        return result

    def _end_backward(self) -> None:
        self._memory.end_backward()
        self._eager.hand_held()

    def _gather_in_backward(self, units: frozenset[fsdp2.Unit]) -> None:
        """For code around graphs."""
        self.backward.runs()
        self._prefetch.gather_in_backward(units)

    def _await_optimizer(self) -> None:
        """Nothing reads a parameter before the event that stands for the optimizer."""
        if self._optimizer_event is not None and self.units and self.units[0].device.type != "cpu":
            torch.accelerator.current_stream().wait_event(self._optimizer_event)
            self._optimizer_event = None

    @uncaptured
    def unshard_outside(self, module: nn.Module, name: str) -> Tensor:
        """Gathers one parameter in the middle of a forward that no graph covers, once per forward."""
        if is_selective():
            with recomputing_all(self.context.report):
                return self.unshard_outside(module, name)
        leaf, _, more = module.__dict__[marked_classes.shard_key(name)]
        shard = self.shards.at(leaf)
        if (other := self.shards.other_value(shard, module, name)) is not None:
            return other
        if not self.is_gathered(module, name):  # in FSDP2, too
            self.handed_out(module, name)
            found = own_parameters(module)[name]
            assert found is not None
            return found
        if self.running:
            full = self._outside.read(shard)
        else:  # recomputed without a call of any module: a call that does nothing else
            self._begin_forward(module)
            try:
                full = self._outside.read(shard)
            finally:
                self._end_forward()
        return full if more is None or more[0] is None else marked_classes.as_tensor_parallel(full, *more[0])

    def is_gathered(self, module: nn.Module, name: str) -> bool:
        """Whether code around graphs has a parameter gathered now: the forward of its unit runs, or is recomputed."""
        if module.__dict__[FORWARD].runs:
            return True
        if not recomputes():
            return False
        shard = self.shards.at(module.__dict__[marked_classes.shard_key(name)][0])
        gathers = self.holdings.gathers
        return shard in self._outside.served or (
            self.holdings.forward.has_checkpoints and shard.unit not in gathers.handed_out
        )

    def handed_out(self, module: nn.Module, name: str) -> None:
        """Code around graphs has a parameter as a shard: what it writes of it is not always counted."""
        shard = self.shards.at(module.__dict__[marked_classes.shard_key(name)][0])
        if shard.unit not in self.holdings.gathers.handed_out:
            self.holdings.gathers.handed_out.add(shard.unit)
            self.context.report.note_once(
                f"{class_of(shard.unit)}: code around graphs has shards of its units, which it may write: these are "
                "not gathered ahead of it"
            )

    # -- FSDP2's methods (see `marked_classes`)

    @uncaptured
    def unshard(self, module: nn.Module, async_op: bool) -> UnshardHandle | None:
        """`FSDPModule.unshard`: gathers a unit's parameters, which stay until `reshard`, a forward or a backward."""
        self._prepare()
        handle = self.holdings.gathers.unshard(self.shards.units_of(module))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, module: nn.Module) -> None:
        """`FSDPModule.reshard`."""
        self.holdings.gathers.reshard(self.shards.units_of(module))

    def reshard_all(self) -> None:
        """Frees all parameters that stay gathered: a state dict holds shards."""
        self.holdings.gathers.reshard_all()

    def reset_iter_state(self) -> None:
        """`FSDPModule.reset_iter_state`: forgets what a failed step left behind."""
        self.holdings.forward.runs = False
        self._outside.clear()
        self.backward.reset()
        self.holdings.reset()

    def reduce_held(self) -> None:
        """Reduces what earlier backwards left unreduced, now."""
        self._eager.take_held()
        self.holdings.reductions.end_backward()

    def wait_for_optimizer(self, event: Any) -> None:
        """`FSDPModule.set_post_optim_event`."""
        self._optimizer_event = event

    def begin_half(self, half: str) -> None:
        """A pipeline stage is about to run the half of a backward for its ``"input"``, or for each ``"weight"``.

        Raises:
            UnsupportedModel: there are no backward programs, of which one could be a half.
        """
        if not self.compiled:
            return
        if self.options.backend == "eager":
            raise UnsupportedModel(
                f"{type(self.model).__name__}: a pipeline's schedule splits its backward; got backend='eager', want "
                "'aot_eager' or 'inductor'"
            )
        if half == "input":
            self.backward.defer_weights_once()
        else:
            self.backward.run_earliest_weights()

    # -- other ways to run

    def defer_weights(self) -> Callable[[], Callable[[], None]]:
        """From now on backward computes gradients of inputs only; what is returned yields the rest of it, so far."""
        return self.backward.defer_weights()

    def eager(self) -> AbstractContextManager[None]:
        """Inside, FSDP2's own hooks run the model (see `EagerMode.entered`)."""
        self.backward.forget_failed()
        return self._eager.entered()
