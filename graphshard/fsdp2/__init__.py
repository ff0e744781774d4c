"""The state that FSDP2 keeps, read: with `compat`, the only code that knows private names of torch (2.11 to 2.15).

FSDP2 owns the sharded parameters, their padding, their DTensors and the flags that users set. It is
written in four ways only: gathered parameters are registered, reduced gradients delivered, FSDP2's own lazy init and
reshard called, its hooks and registered methods taken off and put back in their places. Imports nothing of graphshard.
"""

from graphshard.fsdp2.extensions import AllGatherExtension, whole_parameter
from graphshard.fsdp2.models import (
    ForwardHooks,
    annotation_mesh,
    is_annotated,
    lazy_init,
    mixed_dtypes,
    named_units,
    parameter_names,
    refused_shards,
    replicate,
    sharded_units,
    unit_modules,
    without_wrappers,
)
from graphshard.fsdp2.params import Layout, ShardedParam
from graphshard.fsdp2.plain import attributes_without, hook_keys, own_class
from graphshard.fsdp2.units import Unit

__all__ = [
    "AllGatherExtension",
    "ForwardHooks",
    "Layout",
    "ShardedParam",
    "Unit",
    "annotation_mesh",
    "attributes_without",
    "hook_keys",
    "is_annotated",
    "lazy_init",
    "mixed_dtypes",
    "named_units",
    "own_class",
    "parameter_names",
    "refused_shards",
    "replicate",
    "sharded_units",
    "unit_modules",
    "whole_parameter",
    "without_wrappers",
]
