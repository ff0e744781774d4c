"""What a training step would take on any number of GPUs, without any: models are traced on tensors without data."""

from graphshard.scale.estimate import Setting, StepEstimate, Workload, estimate_step
from graphshard.scale.models import ModelChoice, make_workload
from graphshard.scale.resize import Layout

__all__ = ["Layout", "ModelChoice", "Setting", "StepEstimate", "Workload", "estimate_step", "make_workload"]
