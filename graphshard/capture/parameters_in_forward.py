"""`named_parameters`, of which `parameters` is made, and `get_parameter` of a module in a running forward: parameters
are gathered while the forward of their unit runs, as FSDP2 registers them then; those of other units are shards.

Modules that own no parameters answer so, too: `next(self.mlp.parameters()).dtype` is how many ask for `param_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from graphshard.compat.dynamo import inline_only
from graphshard.compat.modules import child_modules, own_parameters

# On each module of a unit: its `UnitForward`.
FORWARD = "_graphshard_forward"


class UnitForward:
    """Whether the forward of a unit's module runs. The unit's hooks say so, in a trace, too.

    Args:
        model: name of the model, which no other has.

    Attributes:
        runs: that name while it runs, else empty. Whatever reads it is compiled for that model alone: behind Dynamo's
            recompile limit a frame takes code that was compiled for other models, too, as far as guards let it.
    """

    is_put_back = True  # a block leaves it as it has found it: no change, for those that look for one (see `Changes`)

    def __init__(self, model: str) -> None:
        self.model = model
        self.runs = ""


# (name, parameter)
Named = Iterator[tuple[str, Any]]


def parameters_in_forward(
    cls: type[nn.Module],
    asked: Callable[[nn.Module], None],
    in_forward: Callable[[nn.Module], bool],
    is_gathered: Callable[[nn.Module, str], bool],
    key_of: Callable[[str], str],
    hand_out: Callable[[nn.Module, str], None],
) -> dict[str, Callable[..., Any]]:
    """`named_parameters` and `get_parameter` of a marked class.

    Args:
        cls: that it marks. Methods of the user's own say themselves what they yield.
        asked: is told first.
        in_forward: whether a module is asked in a forward of its model, traced or not.
        is_gathered: whether a parameter is gathered then.
        key_of: key in a module's `__dict__` of what it holds for a sharded parameter, its leaf first.
        hand_out: is told of each parameter that is yielded as a shard.
    """
    own, own_get = cls.named_parameters, cls.get_parameter

    def ask(self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Named:
        asked(self)
        if own is not nn.Module.named_parameters or not in_forward(self):
            return own(self, prefix, recurse, remove_duplicate)
        return walk(self, f"{prefix}." if prefix else "", recurse, set() if remove_duplicate else None)

    @inline_only
    def walk(module: nn.Module, prefix: str, recurse: bool, seen: set[Any] | None) -> Named:
        held, registered = module.__dict__, own_parameters(module)
        for name in registered:
            key = key_of(name)
            tensor: Tensor | None = held[key][0] if key in held else registered[name]
            if tensor is None or is_seen(tensor, seen):
                continue
            yield prefix + name, value_of(module, name)
        for name, child in child_modules(module).items() if recurse else ():
            if child is not None and not is_seen(child, seen):
                yield from walk(child, f"{prefix}{name}.", True, seen)

    def get(self: nn.Module, target: str) -> Any:
        asked(self)
        if own_get is nn.Module.get_parameter and in_forward(self):
            *path, name = target.split(".")
            module: Any = self
            for child in path:
                module = None if module is None else child_modules(module).get(child)
            if module is not None and own_parameters(module).get(name) is not None:
                return value_of(module, name)
        return own_get(self, target)

    @inline_only
    def value_of(module: nn.Module, name: str) -> Any:
        if is_gathered(module, name):
            return getattr(module, name)
        hand_out(module, name)
        return own_parameters(module)[name]

    @inline_only
    def is_seen(found: object, seen: set[Any] | None) -> bool:
        if seen is None:
            return False
        if found in seen:
            return True
        seen.add(found)
        return False

    return {"named_parameters": inline_only(ask), "get_parameter": inline_only(get)}
