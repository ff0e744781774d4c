"""graphshard: `torch.compile` and FSDP2 in one: the collectives are nodes of the compiled graph."""

from graphshard.api import compile, eager, report, weight_backward
from graphshard.errors import UnsupportedModel, VerifyError
from graphshard.explaining import explain, measure
from graphshard.units import find_units

__all__ = [
    "UnsupportedModel",
    "VerifyError",
    "compile",
    "eager",
    "explain",
    "find_units",
    "measure",
    "report",
    "weight_backward",
]
__version__ = "0.1.0"
