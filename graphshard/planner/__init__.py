"""Plans one program on paper: a problem of numbers in, a schedule of buckets, launches and waits out.

List scheduling, and a local search over its bucket boundaries and priorities, timed by a simulator. Knows no graph and
imports nothing of graphshard.
"""

from graphshard.planner.accumulation import Accumulation, accumulation_choice
from graphshard.planner.baselines import fixed_size_schedule, fsdp2_schedule, per_parameter_schedule
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.choose import BudgetTooSmall, Choice, best_schedule
from graphshard.planner.live_memory import LiveBytes, live_by_category
from graphshard.planner.problem import GatherTask, OwnCollective, Problem, ReductionTask, Tasks, Transfer, is_coalesced
from graphshard.planner.realised import OrderImpossible, realised_schedule
from graphshard.planner.regions import RegionRun, pass_problem
from graphshard.planner.residency import choose_residency, fsdp2_peaks, with_residency
from graphshard.planner.schedule import (
    Bucket,
    OwnPlace,
    Schedule,
    ScheduledStep,
    StepKind,
    check_schedule,
    own_places,
    shared_own,
)
from graphshard.planner.simulator import Event, Exposure, Simulation, simulate

__all__ = [
    "Accumulation",
    "Bucket",
    "BudgetTooSmall",
    "Choice",
    "Event",
    "Exposure",
    "GatherTask",
    "LiveBytes",
    "OrderImpossible",
    "OwnCollective",
    "OwnPlace",
    "Problem",
    "ReductionTask",
    "RegionRun",
    "Schedule",
    "ScheduledStep",
    "Simulation",
    "StepKind",
    "Tasks",
    "Transfer",
    "accumulation_choice",
    "best_schedule",
    "check_schedule",
    "choose_residency",
    "fixed_size_schedule",
    "fsdp2_peaks",
    "fsdp2_schedule",
    "is_coalesced",
    "live_by_category",
    "lower_bound_us",
    "own_places",
    "pass_problem",
    "per_parameter_schedule",
    "realised_schedule",
    "shared_own",
    "simulate",
    "with_residency",
]
