"""What a training step would take on any number of GPUs, without any: models are traced on tensors without data.

Starts no process; its process groups are fake. Imports `runtime` and what is below it.
"""

from graphshard.scale.estimate import Setting, StepEstimate, Workload, estimate_step
from graphshard.scale.models import ModelChoice, make_workload
from graphshard.scale.resize import RankLayout

__all__ = ["ModelChoice", "RankLayout", "Setting", "StepEstimate", "Workload", "estimate_step", "make_workload"]
