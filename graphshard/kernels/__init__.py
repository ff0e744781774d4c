"""Copies between tensors and flat buffers, as operators: one Triton kernel on CUDA, torch elsewhere.

Knows tensors and their flat buffer, no graph. Imports `env` and, for a table, `reporting`.
"""

from graphshard.kernels import ops as ops
from graphshard.kernels.available import can_copy as can_copy
from graphshard.kernels.available import fuses_on as fuses_on
