"""Gives the modules of one model their marked classes (see `marked_classes`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from graphshard.capture import marked_classes
from graphshard.capture.parameters_in_forward import FORWARD, UnitForward
from graphshard.compat.modules import global_hooks, hooks_of, own_parameters
from graphshard.fsdp2 import Unit


def mark_classes(
    engine: marked_classes.ModelRunner,
    model: str,
    units: Sequence[Unit],
    unit_modules: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
) -> frozenset[int]:
    """Marks the modules that own sharded parameters, those of units, and those between.

    Args:
        engine: of the model, which is put on each module.
        model: its name, which no other model has.
        units: of the model.
        unit_modules: modules that `fully_shard` was called on.
        blocks: of them, those that may be alike.

    Returns:
        Ids of modules that contain units: with a region per unit, they are plain Python around them.
    """
    names: dict[int, set[str]] = {}
    modules: dict[int, nn.Module] = {id(module): module for module in unit_modules}
    for unit in units:
        for param in unit.params:
            for module, name in param.owners:
                modules[id(module)] = module
                names.setdefault(id(module), set()).add(name)
    engine_of = weakref.ref(engine)

    def reshard(module: nn.Module, *args: Any) -> None:
        if (engine := engine_of()) is not None:  # a state dict holds shards
            engine.reshard_all()

    alike = {id(block) for block in blocks}
    for key, module in modules.items():
        module.__dict__[marked_classes.ENGINE] = engine
        module.__class__ = marked_classes.marked_class(type(module), tuple(sorted(names.get(key, ()))), key in alike)
        module.register_state_dict_pre_hook(reshard)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(reshard)  # type: ignore[no-untyped-call]
    for unit_module in unit_modules:
        forward = UnitForward(model)
        for module in _modules_of(unit_module):
            module.__dict__[FORWARD] = forward
            if id(module) not in modules and any(id(inner) in names for inner in module.modules()):
                module.__dict__[marked_classes.ENGINE] = engine
                module.__class__ = marked_classes.marked_around(type(module))
    inner = {id(module) for module in unit_modules}
    return frozenset(
        key
        for key, module in modules.items()
        if any(id(child) in inner for child in module.modules() if child is not module)
    )


def _modules_of(unit_module: nn.Module) -> list[nn.Module]:
    """A module that `fully_shard` was called on, and what is inside it, down to others."""
    found = {id(unit_module): unit_module}
    left = [unit_module]
    while left:
        new = [child for child in left.pop().children() if id(child) not in found and not isinstance(child, FSDPModule)]
        found.update({id(child): child for child in new})
        left += new
    return list(found.values())


def hook_keys(modules: Iterable[nn.Module]) -> list[int]:
    """Of all hooks of some modules, and of those of every module: other keys, other hooks."""
    keys = [key for key, _ in global_hooks()]
    return keys + [key for module in modules for key, _ in hooks_of(module)]


def shared_code_key(module: nn.Module) -> object:
    """What modules must have in common to share compiled code, beyond what Dynamo guards: it guards no hooks. Nor do
    they share it where they have other modules or parameters: torch 2.13 looks for those of one in another
    (`KeyError`) where it says why guards failed that tensors are no aliases.
    """
    opens = ((name, inner) for name, inner in module.named_modules() if not isinstance(inner, torch.jit.ScriptModule))
    inside = [(name, type(inner), *own_parameters(inner)) for name, inner in opens]
    hooks = ((i, hook) for i, inner in enumerate(module.modules()) for _, hook in hooks_of(inner))
    return type(module), tuple(inside), tuple(hooks), tuple(hook for _, hook in global_hooks())
