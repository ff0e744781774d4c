"""Plans the programs of one model: reads the problem off a marked graph, chooses a schedule, keeps what was decided."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.fx import Graph, GraphModule

from graphshard.agree.agreement import Posted, Waited
from graphshard.agree.contract import Contract
from graphshard.agree.ranks_alike import DEADLINE_S
from graphshard.graph.ir import PassContext
from graphshard.graph.plan import Decision, ProgramPlan
from graphshard.plan_file import Plan, ProgramProblem, plan_digest, program_name, replay
from graphshard.planner import (
    Accumulation,
    BudgetTooSmall,
    Choice,
    Problem,
    RegionRun,
    Simulation,
    accumulation_choice,
    fixed_size_schedule,
    fsdp2_peaks,
    fsdp2_schedule,
    lower_bound_us,
    per_parameter_schedule,
    simulate,
    with_residency,
)
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.planning.named_plan import bucket_is_coalesced, named_plan
from graphshard.planning.pass_plan import region_run
from graphshard.planning.plan_cache import remembered_residency, remembered_schedule
from graphshard.planning.realising import realise
from graphshard.version import __version__

log = logging.getLogger(__name__)

# How many there are is not known when the first one runs: the fewest that accumulate.
_MICRO_BATCHES = 2


@dataclass
class Planning:
    """How the programs of one model are planned.

    Attributes:
        scene: machine and process groups.
        mode: ``"auto"``, or ``"fsdp2"``: schedules are FSDP2's, and are timed only.
        budget_bytes: most that a program may allocate; None: what FSDP2's schedules do.
        keeps: whether it also decides which units stay gathered from forward to backward.
        backward: the backward graph that was partitioned last, until its forward graph has been planned.
        stored: plans that are replayed; what has none there is planned.
        stored_in: says where these are from.
        posts: what this rank has posted for the others, until it is compared.
        deadline_s: most seconds to wait for the others then.
    """

    scene: Scene
    mode: str = "auto"
    budget_bytes: int | None = None
    keeps: bool = False
    backward: GraphModule | None = None
    stored: Plan | None = None
    stored_in: str = ""
    posts: list[Posted] = field(default_factory=list)
    deadline_s: float = DEADLINE_S

    def agree(self, waited: Waited) -> None:
        """Compares with the other ranks, once. `waited`: see `Posted.compare`.

        Raises:
            RanksDiffer: another rank plans otherwise, or has another model.
        """
        while self.posts:  # what differs stays, to be said again
            self.posts[0].compare(self.deadline_s, waited)
            del self.posts[0]

    @property
    def settings(self) -> tuple[str, ...]:
        """What shapes a plan besides the graph, in lines."""
        hardware, budget = self.scene.cost.hardware, self.budget_bytes
        stored = "none" if self.stored is None else plan_digest(self.stored)
        return (
            f"torch {torch.__version__}, graphshard {__version__}",
            f"plan {self.mode}, of file {stored}",
            f"memory_budget {'as FSDP2' if budget is None else budget}",
            f"hardware {hardware.name} {self.scene.cost.fingerprint}",
            f"reshard_after_forward {'planned' if self.keeps else 'given'}",
        )

    @property
    def fingerprint(self) -> str:
        """A short name of all that shapes a plan besides the graph."""
        return hashlib.sha256("\n".join(self.settings).encode()).hexdigest()[:16]

    def take_backward(self) -> GraphModule | None:
        """`backward`, once."""
        backward, self.backward = self.backward, None
        return backward

    def ranks_of(self, group: str) -> int:
        """Number of ranks of a process group, by its name."""
        return self.scene.group_shape(group).ranks


class RegionPlanning:
    """Plans the programs of one region.

    Args:
        planning: of the model.
        number: of the region.
        note: is told what the user should know.

    Attributes:
        latest: what was decided last, None if nothing was.
        replayed: whether that comes from a stored plan.
        fsdp2_bytes: what FSDP2's schedules allocate by the flags of the capture: most of the program that was planned
            last, and of those of a usual step.
        spent_s: seconds that planning took so far, without waits for other ranks.
        note: of the arguments.
    """

    def __init__(self, planning: Planning, number: int = 0, note: Callable[[str], None] = lambda line: None) -> None:
        self._planning = planning
        self._number = number
        self.note = note
        self._kept: frozenset[str] | None = None
        self._step_bytes = 0  # what FSDP2's schedules of forward and backward allocate
        self._kept_bytes: dict[str, int] = {}  # by direction, what those allocate more with the units that are kept
        self._behind: Problem | None = None  # the backward, as FSDP2's flags have it
        self._accumulation: Accumulation | None = None
        self._runs: dict[Graph, RegionRun] = {}
        self.latest: Decision | None = None
        self.replayed = False
        self.fsdp2_bytes = 0
        self.spent_s = 0.0
        self._told_s = 0.0

    def newly_spent_s(self) -> float:
        """What `spent_s` has grown by since this was last asked."""
        before_s, self._told_s = self._told_s, self.spent_s
        return self.spent_s - before_s

    @contextmanager
    def _spending(self) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - start_s

    @contextmanager
    def noting(self, note: Callable[[str], None]) -> Iterator[None]:
        """Inside, another is told what the user should know."""
        before, self.note = self.note, note
        try:
            yield
        finally:
            self.note = before

    def forget(self) -> None:
        """Forgets what was decided last."""
        self.latest, self.replayed = None, False

    @property
    def chooses(self) -> bool:
        """Whether its plans are carried out, not only timed."""
        return self._planning.mode == "auto"

    @property
    def keeps_units(self) -> bool:
        """Whether units that it keeps gathered are counted within a budget that nobody asked for."""
        return not self.budget_is_asked and any(self._kept_bytes.values())

    def has_kept(self, units: Set[str]) -> bool:
        """Whether it was planned that all of these units stay gathered; else flags that were set since keep some."""
        return units <= (self._kept or frozenset())

    @property
    def budget_is_asked(self) -> bool:
        """Whether the user gave the budget."""
        return self._planning.budget_bytes is not None

    def __call__(
        self,
        graph: Graph,
        ctx: PassContext,
        flags: str = "default",
        short_bytes: int = 0,
        as_fsdp2: bool = False,
        contract: Contract | None = None,
        on_top: bool = False,
    ) -> ProgramPlan | None:
        """The plan of one marked graph; None: there is nothing to plan, or FSDP2's order is wanted.

        Args:
            graph: to plan.
            ctx: its parameters and flags.
            flags: their text, by which a stored plan is found.
            short_bytes: of the budget that are to be left free.
            as_fsdp2: FSDP2's schedule is taken, whatever it allocates.
            contract: of the program, to be realised, if there is one.
            on_top: units that are kept may take memory on top of FSDP2's.

        Raises:
            BudgetTooSmall: no plan fits the budget.
            PlanMismatch: the stored plan of that name is for another graph.
        """
        with self._spending():
            plan = self._plan(graph, ctx, flags, short_bytes, as_fsdp2, contract, on_top)
        if (found := self.latest) is not None:
            log.debug(
                "graphshard: %s of region %d is planned: schedule %s, %d buckets, %.0f us of which %.0f us exposed, "
                "%d of %d bytes", ctx.direction, self._number, found.choice.name, len(found.plan.buckets),
                found.choice.simulation.step_us, found.choice.simulation.exposed_us,
                found.choice.simulation.peak_bytes, found.budget_bytes,
            )  # fmt: skip
        return plan

    def _plan(
        self,
        graph: Graph,
        ctx: PassContext,
        flags: str,
        short_bytes: int,
        as_fsdp2: bool,
        contract: Contract | None,
        on_top: bool,
    ) -> ProgramPlan | None:
        planning, name = self._planning, program_name(self._number, ctx.direction, flags)
        self.forget()
        if contract is not None:
            self.latest = self._realised(graph, ctx, contract)
            if self.latest is None:
                return None
            if planning.stored is not None and not planning.stored.find(self._number, ctx.direction, flags):
                self._note_missing(name)
            return self.latest.plan
        if any(settings.forward_prefetch or settings.backward_prefetch for _, settings in ctx.flags.units):
            if planning.stored is not None:
                self.note(f"{planning.stored_in}: not used for {name}, whose units say what they prefetch")
            return None  # users have chosen
        if planning.stored is not None:
            extract = partial(_extract_as_stored, graph, ctx, planning.scene)
            fqns = frozenset(param.fqn for param in ctx.params.values())
            named = ProgramProblem(self._number, ctx.direction, flags, extract, planning.ranks_of, fqns)
            self.latest = replay(planning.stored, named, planning.stored_in, planning.budget_bytes)
            if self.latest is not None:
                self.replayed = True
                return self.latest.plan if self.chooses else None
        problem = extract_problem(graph, ctx, planning.scene)
        if not problem.gathers and not problem.reductions:
            return None
        if planning.stored is not None:
            self._note_missing(name)
        fsdp2 = simulate(problem, fsdp2_schedule(problem))
        self.fsdp2_bytes = self._fsdp2_bytes(ctx.direction, fsdp2, False)
        budget_bytes = planning.budget_bytes or self._fsdp2_bytes(ctx.direction, fsdp2, on_top)
        if as_fsdp2 or not self.chooses:
            choice = Choice(fsdp2_schedule(problem), fsdp2, lower_bound_us(problem), "fsdp2", ())
        else:
            choice = self._best_schedule(problem, budget_bytes - short_bytes)
        self.latest = self._decided(problem, choice, budget_bytes)
        return self.latest.plan if self.chooses else None

    def _note_missing(self, name: str) -> None:
        planning = self._planning
        self.note(f"{planning.stored_in}: has no plan for {name}, which is planned as by plan={planning.mode!r}")

    def _realised(self, graph: Graph, ctx: PassContext, contract: Contract) -> Decision | None:
        problem, schedule = realise(graph, ctx, self._planning.scene, contract, self._planning.budget_bytes)
        if not problem.gathers and not problem.reductions:
            return None
        makers = {"fsdp2": fsdp2_schedule, "per_parameter": per_parameter_schedule, "fixed_size": fixed_size_schedule}
        baselines = {name: simulate(problem, make(problem)) for name, make in makers.items()}
        choice = Choice(
            schedule,
            simulate(problem, schedule),
            lower_bound_us(problem),
            contract.chosen,
            tuple((name, its.step_us, its.peak_bytes) for name, its in baselines.items()) if self.chooses else (),
        )
        most = max(choice.simulation.peak_bytes, self._fsdp2_bytes(ctx.direction, baselines["fsdp2"], False))
        return self._decided(problem, choice, self._planning.budget_bytes or most)

    def _decided(self, problem: Problem, choice: Choice, budget_bytes: int) -> Decision:
        kept = None if self._kept is None or problem.direction != "forward" else tuple(sorted(self._kept))
        return Decision(problem, choice, named_plan(problem, choice.schedule), budget_bytes, kept)

    def _fsdp2_bytes(self, direction: str, fsdp2: Simulation, on_top: bool) -> int:
        """What FSDP2's schedules allocate in a step. `fsdp2`: that of a program, with the units that are kept;
        `on_top`: these are not taken off: by flags that were set since, FSDP2 may keep them, too.
        """
        kept_bytes = 0 if on_top else self._kept_bytes.get(direction, 0)
        return max(fsdp2.peak_bytes - kept_bytes, self._step_bytes)

    def _best_schedule(self, problem: Problem, budget_bytes: int) -> Choice:
        try:
            return remembered_schedule(problem, budget_bytes)
        except BudgetTooSmall as error:
            if self._behind is not None and problem.direction == "forward":
                try:  # to say all that a step needs at once
                    remembered_schedule(self._behind, budget_bytes)
                except BudgetTooSmall as its:
                    raise BudgetTooSmall(f"{error}; {its}") from None
            raise

    def run_of(self, graph: Graph, ctx: PassContext) -> RegionRun:
        """One run of a region in a pass, as its marked graph shows it, but for names: equal blocks share it."""
        if (found := self._runs.get(graph)) is None:
            with self._spending():
                found = self._runs[graph] = region_run(graph, ctx, extract_problem(graph, ctx, self._planning.scene))
        return found

    def coalesces(self, kind: str, members: Sequence[str]) -> bool:
        """Whether a bucket of the program that was planned last is sent without a flat buffer."""
        return self.latest is not None and bucket_is_coalesced(self.latest.problem, kind, members)

    def keep_units(
        self,
        forward: Callable[[], tuple[Graph, PassContext]],
        backward: Callable[[], tuple[Graph, PassContext]],
        by_default: frozenset[str],
        settled: Callable[[Callable[[], str]], str],
    ) -> frozenset[str] | None:
        """Names of the units that stay gathered from forward to backward; None: FSDP2's flags say.

        Args:
            forward: makes the graph to plan, and its context.
            backward: the same.
            by_default: units that stay in FSDP2.
            settled: what all ranks do, given what this one would.
        """
        if self._planning.mode == "fsdp2":
            return None
        with self._spending():
            ahead, back = (extract_problem(graph, ctx, self._planning.scene) for graph, ctx in (forward(), backward()))
            _, self._behind = with_residency(ahead, back, by_default)
            peaks = fsdp2_peaks(ahead, back, by_default)
        self._step_bytes = max(peaks.values())
        text = settled(lambda: json.dumps(self._chosen_kept(ahead, back)))
        self._kept = None if (names := json.loads(text)) is None else frozenset(names)
        if self._kept is not None:
            with_kept = fsdp2_peaks(ahead, back, self._kept)
            self._kept_bytes = {direction: max(0, with_kept[direction] - peak) for direction, peak in peaks.items()}
        return self._kept

    def _chosen_kept(self, forward: Problem, backward: Problem) -> list[str] | None:
        planning = self._planning
        stored = None if planning.stored is None else planning.stored.find_forward(self._number)
        if stored is not None:
            return None if stored.kept is None else list(stored.kept)
        if not planning.keeps:
            return None
        with self._spending():
            return sorted(remembered_residency(forward, backward, planning.budget_bytes or self._step_bytes))

    def accumulates_sharded(self, graph: Graph, ctx: PassContext) -> str:
        """Why a backward that is asked to leave gradients unreduced reduces them all the same; ``""``: it does not.

        Args:
            graph: marked backward graph.
            ctx: its usual context.
        """
        budget_bytes = self._planning.budget_bytes
        if self._planning.mode == "fsdp2" or budget_bytes is None:
            return ""
        if self._accumulation is None:
            with self._spending():
                problem = extract_problem(graph, ctx, self._planning.scene)
                self._accumulation = accumulation_choice(problem, _MICRO_BATCHES, budget_bytes)
        return self._accumulation.why if self._accumulation.reduce_each else ""


def _extract_as_stored(graph: Graph, ctx: PassContext, scene: Scene, cuts: frozenset[str] | None) -> Problem:
    """With the ops of a stored plan, whether it was made with seams or without."""
    return extract_problem(graph, ctx, scene, cuts, exact=cuts is not None)
