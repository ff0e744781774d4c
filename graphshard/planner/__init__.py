"""Plans one program on paper: a problem of numbers in, a schedule of buckets, launches and waits out."""

from graphshard.planner.across import Depth, choose_depth
from graphshard.planner.baselines import fixed_size_schedule, fsdp2_schedule, per_parameter_schedule
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.choose import BudgetTooSmall, Choice, best_schedule
from graphshard.planner.keep import Accumulation, accumulation_choice, choose_kept, kept_problems
from graphshard.planner.live_memory import LiveBytes, live_by_category
from graphshard.planner.problem import Gather, OwnCollective, Problem, Reduction, Transfer, is_coalesced
from graphshard.planner.realised import OrderImpossible, realised_schedule
from graphshard.planner.schedule import Action, Bucket, Schedule, check_schedule
from graphshard.planner.simulator import Event, Exposure, Simulation, simulate

__all__ = [
    "Accumulation",
    "Action",
    "Bucket",
    "BudgetTooSmall",
    "Choice",
    "Depth",
    "Event",
    "Exposure",
    "Gather",
    "LiveBytes",
    "OrderImpossible",
    "OwnCollective",
    "Problem",
    "Reduction",
    "Schedule",
    "Simulation",
    "Transfer",
    "accumulation_choice",
    "best_schedule",
    "check_schedule",
    "choose_depth",
    "choose_kept",
    "fixed_size_schedule",
    "fsdp2_schedule",
    "is_coalesced",
    "kept_problems",
    "live_by_category",
    "lower_bound_us",
    "per_parameter_schedule",
    "realised_schedule",
    "simulate",
]
