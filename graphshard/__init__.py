"""graphshard: `torch.compile` and FSDP2 in one: the collectives are nodes of the compiled graph."""

from graphshard.api import compile, eager, report, save_plan, weight_backward
from graphshard.capture.units import find_units
from graphshard.debugging import debug
from graphshard.errors import CommunicationFailed, ModelDeleted, RanksDiffer, UnsupportedModel, VerifyError
from graphshard.examining import doctor
from graphshard.explaining import explain, measure
from graphshard.plan_file import Plan, PlanMismatch, load_plan
from graphshard.planner import BudgetTooSmall
from graphshard.version import __version__ as __version__

__all__ = [
    "BudgetTooSmall",
    "CommunicationFailed",
    "ModelDeleted",
    "Plan",
    "PlanMismatch",
    "RanksDiffer",
    "UnsupportedModel",
    "VerifyError",
    "compile",
    "debug",
    "doctor",
    "eager",
    "explain",
    "find_units",
    "load_plan",
    "measure",
    "report",
    "save_plan",
    "weight_backward",
]
