"""The units of an annotated model, and FSDP2's hooks on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method

from graphshard.fsdp2.params import ShardedParam
from graphshard.fsdp2.sharding_arguments import Refusal, check, refused_dtypes, refused_policy, refused_tensor
from graphshard.fsdp2.units import Unit

_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def is_annotated(model: nn.Module) -> bool:
    """Whether `fully_shard` or `replicate` was applied to `model` or to a module inside it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def replicate(module: nn.Module, mesh: DeviceMesh, policies: dict[str, Any]) -> None:
    """Annotates `module` by torch's composable `replicate`, FSDP2's data parallelism without sharding."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

    torch_replicate(module, mesh=mesh, **policies)


def annotation_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the first annotated module that has parameters, or None."""
    for _, _, raw in _raw_groups(model):
        mesh: DeviceMesh = raw.mesh_info.mesh
        return mesh
    return None


def unit_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that `fully_shard` was called on, in `named_modules()` order."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_units(model: nn.Module) -> list[Unit]:
    """Units of an annotated model in `named_modules()` order, those without parameters left out.

    A call of `fully_shard` whose parameters are on several meshes makes several units, `layers.0`, `layers.0#1`, ...
    """
    units: list[Unit] = []
    for name, state, raw in _raw_groups(model):
        number = sum(key == id(state) for key in (unit.state_id for unit in units))
        units.append(Unit(raw, state, f"{name}#{number}" if number else name))
    names: dict[int, list[str]] = {}
    for unit in units:
        names.setdefault(unit.state_id, []).append(unit.name)
        unit.names = names
    return units


def parameter_names(model: nn.Module, params: Sequence[ShardedParam]) -> list[str]:
    """FQN of each of `params`, the first of its names if it is tied, whether it is registered as its shard or in full.

    Checkpoint wrappers leave no trace.

    Raises:
        RuntimeError: a module that owns one is in the model no more.
    """
    modules = {id(module): name for name, module in model.named_modules()}
    names = []
    for param in params:
        module, name = param.owners[0]
        if (prefix := modules.get(id(module))) is None:
            raise RuntimeError(
                f"compile: a {type(module).__name__.removeprefix('FSDP')} with parameter '{name}', sharded as part of "
                f"{type(model).__name__.removeprefix('FSDP')}, is in it no more: another took its place after "
                "graphshard.compile; want modules replaced before they are sharded"
            )
        names.append(without_wrappers(f"{prefix}.{name}" if prefix else name))
    return names


def named_units(model: nn.Module, units: Sequence[Unit]) -> Iterator[tuple[Unit, dict[str, ShardedParam]]]:
    """Units of a model, with their parameters by `parameter_names`, which walks it once for all of them."""
    names = iter(parameter_names(model, [param for unit in units for param in unit.params]))
    for unit in units:
        yield unit, {next(names): param for param in unit.params}


def without_wrappers(name: str) -> str:
    """An FQN without traces of checkpoint wrappers."""
    return name.replace(_WRAPPER_PREFIX, "")


def refused_shards(model: nn.Module) -> Iterator[Refusal]:
    """Sharded parameters that no program can gather."""
    for _, params in named_units(model, sharded_units(model)):
        for name, param in params.items():
            yield from refused_tensor(name, param.parameter)
            yield from refused_policy(name, param.parameter, param.param_dtype)


def mixed_dtypes(model: nn.Module) -> Iterator[Refusal]:
    """Units whose trainable parameters are not of one dtype, which matters from the first forward on."""
    for unit, params in named_units(model, sharded_units(model)):
        tensors = {name: param.parameter for name, param in params.items()}
        yield from refused_dtypes(unit.name, {name: t.dtype for name, t in tensors.items() if t.requires_grad})


def lazy_init(model: nn.Module) -> None:
    """Runs FSDP2's own lazy initialization, for the outermost annotated modules first.

    Raises:
        RuntimeError: FSDP2's, when parameters are still on the meta device.
        ValueError: trainable parameters of a unit differ in dtype; FSDP2's, when two units share a parameter.
    """
    check(mixed_dtypes(model))
    for state in _states(model).values():
        if state._is_root is None:
            state._lazy_init()


def _states(model: nn.Module) -> dict[str, Any]:
    states: dict[str, Any] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if id(state) not in seen:  # one state serves every module of a list of modules
                seen.add(id(state))
                states[without_wrappers(name)] = state
    return states


def _raw_groups(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    for name, state in _states(model).items():
        for raw in _groups_of(state):
            yield name, state, raw


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 on
    if groups is None:
        groups = [state._fsdp_param_group]  # torch 2.11
    return [raw for raw in groups if raw is not None and raw.fsdp_params]


@dataclass
class _Slot:
    place: Any  # the OrderedDict of a module's hooks, or a module's __dict__
    key: int | str
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    gathers: Any = None  # FSDP2's state, of a pre-forward hook, and of a method with its hooks around it


# Pre-forward and post-forward hook for a unit's mixed-precision policy, and whether activations enter the unit there.
UnitHooks = Callable[[MixedPrecisionPolicy, bool], tuple[Callable[..., Any], Callable[..., Any]]]
# (method, pre-forward hook, post-forward hook) -> the method as the compiled model calls it.
MakeMethod = Callable[[Callable[..., Any], Callable[..., Any], Callable[..., Any]], Callable[..., Any]]


class ForwardHooks:
    """FSDP2's forward hooks of a model: off while it runs compiled, on for FSDP2's own engine.

    While one is off, a hook that can be traced stands at its place, between the hooks of users: it does the casts of
    the unit's mixed-precision policy, and what else the graph has to know of the unit. Likewise for methods of
    `register_fsdp_forward_method`.

    Args:
        model: the annotated model.
        unit_hooks: gets a unit's policy.
        make_method: gets a registered method.
    """

    def __init__(self, model: nn.Module, unit_hooks: UnitHooks, make_method: MakeMethod) -> None:
        self._model = model
        self._unit_hooks = unit_hooks
        self._make_method = make_method
        self._slots: list[_Slot] = []
        for state in _states(model).values():
            handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
            pre, post = unit_hooks(state._mp_policy, handles[0] is not handles[1] and bool(_groups_of(state)))
            if handles[0] is handles[1]:  # a list of modules: one handle holds the pre-hooks, then the post-hooks
                singles = handles[0].handles
                half = len(singles) // 2
                pairs = [(h, pre) for h in singles[:half]] + [(h, post) for h in singles[half:]]
            else:
                pairs = [(handles[0], pre), (handles[1], post)]
            for handle, replacement in pairs:
                hooks = handle.hooks_dict_ref()
                gathers = state if replacement is pre else None
                self._slots.append(_Slot(hooks, handle.id, hooks[handle.id], replacement, gathers))
        self._attached = True

    def detach(self) -> None:
        """Takes FSDP2's hooks off; casts stay, as hooks that can be traced."""
        self._attached = False
        self.find_methods()
        for slot in self._slots:
            slot.place[slot.key] = slot.replacement

    def attach(self, gathered: Callable[[int], None] | None = None) -> None:
        """Puts FSDP2's hooks back where they were.

        Args:
            gathered: is called whenever a hook has gathered units, with their `state_id`.
        """
        self._attached = True
        for slot in self._slots:
            told = slot.original
            if gathered is not None and slot.gathers is not None:
                told = _telling(slot.original, id(slot.gathers), gathered)
            slot.place[slot.key] = told

    def find_methods(self) -> list[str]:
        """Takes over the methods that `register_fsdp_forward_method` has wrapped lately; returns their names."""
        found = []
        for module in unit_modules(self._model):
            for name, value in list(vars(module).items()):
                function = getattr(value, "__func__", None)
                if getattr(function, "__code__", None) is not _WRAPPED_METHOD:
                    continue
                state = module._get_fsdp_state()  # type: ignore[operator]
                method = self._make_method(value.__wrapped__, *self._unit_hooks(state._mp_policy, False))
                slot = _Slot(vars(module), name, value, MethodType(method, module), state)
                self._slots.append(slot)
                found.append(name)
                if not self._attached:
                    slot.place[slot.key] = slot.replacement
        return found


def _telling(function: Callable[..., Any], state_id: int, gathered: Callable[[int], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        gathered(state_id)
        return result

    return call


# The code that every method wrapped by `register_fsdp_forward_method` runs.
_WRAPPED_METHOD = next(
    code
    for code in register_fsdp_forward_method.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "wrapped_method"
)
