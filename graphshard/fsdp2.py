"""The state that FSDP2 keeps, read. The only file that knows FSDP2's private names (torch 2.11 to 2.15).

FSDP2 owns the sharded parameters, their padding, their DTensors and the flags that users set. Nothing here writes that
state; the forward hooks are taken off and put back at the very place where FSDP2 had registered them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


class ShardedParam:
    """One parameter that FSDP2 shards, as this rank holds it."""

    def __init__(self, raw: Any, unit: Unit) -> None:
        self._raw = raw
        self.unit = unit
        self.size: tuple[int, ...] = tuple(raw._orig_size)

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded DTensor parameter that users and optimizers see."""
        parameter: nn.Parameter = self._raw.sharded_param
        return parameter

    @property
    def flat_shard(self) -> Tensor:
        """Flat shard `[N]` in the parameter's dtype, padded to the same N on every rank; shares storage with
        `parameter`.
        """
        flat: Tensor = self._raw._sharded_param_data
        return flat

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) that the parameter is registered under: more than one when it is tied."""
        place = self._raw._module_info
        return [(place.module, place.param_name), *zip(place.shared_modules, place.shared_param_names, strict=True)]

    @property
    def param_dtype(self) -> torch.dtype:
        """dtype of the gathered parameter."""
        wanted: torch.dtype | None = self._raw.mp_policy.param_dtype  # one per parameter from torch 2.15 on
        return wanted if wanted is not None and self.parameter.dtype.is_floating_point else self.parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype in which gradients are reduced."""
        raw = self._raw
        default = self.parameter.dtype if self.adds_in_reduce_dtype else self.param_dtype
        wanted: torch.dtype | None = raw.mp_policy.reduce_dtype
        return wanted or default

    @property
    def adds_in_reduce_dtype(self) -> bool:
        """Whether a gradient is cast before it is added to one that is held: from torch 2.15 on.

        Before, the sum is computed in the wider of the two dtypes. From 2.15 on gradients are also reduced in the
        parameter's dtype, not in that of the gathered one, where the policy has no reduce_dtype.
        """
        return hasattr(type(self._raw), "unsharded_grad_dtype")

    def deliver_grad(self, flat_grad: Tensor) -> None:
        """Puts a reduced gradient `[N]` (the parameter's dtype, padded) on the DTensor parameter, adding to one that
        is there.
        """
        raw = self._raw
        local = flat_grad.view(raw.padded_sharded_param_size)[: raw.sharded_size[0]]
        parameter = raw.sharded_param
        if parameter.grad is None:
            parameter.grad = raw.to_sharded_dtensor(local)
        else:
            parameter.grad._local_tensor += local
        # As FSDP2 does: autograd never touches the DTensor parameter, so its hooks are called here.
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)

    def unsupported(self) -> str | None:
        """What of this parameter is not compiled, or None."""
        raw = self._raw
        if raw.is_dtensor:
            return "tensor-parallel (DTensor) parameters"
        if raw.fsdp_placement.dim != 0:
            return "shard_placement_fn with a dim other than 0"
        if hasattr(raw._sharded_local_tensor, "fsdp_pre_all_gather"):
            return "all-gather extensions of a tensor subclass"
        if raw.offload_to_cpu:
            return "CPUOffloadPolicy"
        if 0 in self.size:
            return "parameters without elements"
        return None


class ParameterWatch:
    """Notices, before a forward, what happened to parameters since the last one. A tight loop: it runs in every
    step.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        # (FSDP2's parameter, the flat shard it had, whether it was trainable, where it is registered, its name there)
        self._seen = [
            (param._raw, param.flat_shard, param.parameter.requires_grad, module._parameters, name)
            for param in params
            for module, name in param.owners
        ]

    def changed(self) -> bool:
        """Whether a flat shard is another tensor, or a parameter is trainable where it was not, or the reverse.

        Raises:
            RuntimeError: for a parameter that was replaced in its module.
        """
        changed = False
        for raw, flat, trainable, registered, name in self._seen:
            parameter = raw.sharded_param
            if raw._sharded_param_data is not flat or parameter.requires_grad is not trainable:
                changed = True
            if registered.get(name) is not parameter and registered.get(name) is not getattr(
                raw, "_unsharded_param", 0
            ):
                raise RuntimeError(
                    f"parameter '{raw._param_fqn or name}' was replaced after compile: got a "
                    f"{type(registered.get(name)).__name__} that FSDP2 does not shard; copy values into the parameter "
                    "instead (load_state_dict, or copy_ under no_grad)"
                )
        return changed


class Unit:
    """What one `fully_shard` call manages: the parameters that are gathered and reduced together."""

    def __init__(self, raw: Any, state: Any, name: str) -> None:
        self._raw = raw
        self._state = state
        self.name = name
        self.params = [ShardedParam(param, self) for param in raw.fsdp_params]

    @property
    def group_name(self) -> str:
        """Name of the process group that shards are gathered and reduced over."""
        name: str = self._raw.mesh_info.shard_process_group.group_name
        return name

    @property
    def world_size(self) -> int:
        size: int = self._raw.mesh_info.shard_mesh_size
        return size

    @property
    def device_type(self) -> str:
        kind: str = self._raw.device.type
        return kind

    @property
    def reshard_after_forward(self) -> bool:
        reshard: bool = self._raw._reshard_after_forward
        return reshard

    @property
    def reduce_grads(self) -> bool:
        """The flag of `set_requires_gradient_sync`, as it stands now."""
        flag: bool = self._raw.reduce_grads
        return flag

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are registered as their shards: no `unshard()` is open."""
        sharded: bool = self._raw.is_sharded
        return sharded

    def reshard(self) -> None:
        """Frees parameters that were gathered by hand, as `FSDPModule.reshard` does."""
        self._raw.reshard()

    def holds_unreduced_grads(self) -> bool:
        """Whether FSDP2's own engine holds gradients that it has not reduced yet."""
        return any(
            getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
            or getattr(param, "unsharded_accumulated_grad", None) is not None
            for param in self._raw.fsdp_params
        )

    def unsupported(self) -> str | None:
        """What of this unit's layout is not compiled, with its place; None: all of it is. It cannot change later."""
        where = f"unit '{self.name or 'root'}'"
        if (layout := _unsupported_layout(self._raw)) is not None:
            return f"{where} uses {layout}"
        for param in self.params:
            if (what := param.unsupported()) is not None:
                return f"parameter '{param.owners[0][1]}' of {where} uses {what}"
        return None

    def unsupported_now(self) -> str | None:
        """What of this unit's settings, as they stand now, is not compiled, with its place; None: all of it is."""
        raw, what = self._raw, None
        if raw._all_reduce_hook is not None:
            what = "set_all_reduce_hook"
        elif getattr(raw, "gradient_divide_factor", None) is not None:
            what = "set_gradient_divide_factor"
        elif getattr(raw, "force_sum_reduction_for_comms", False):
            what = "set_force_sum_reduction_for_comms"
        elif getattr(raw, "reduce_scatter_unused_params", False):
            what = "set_reduce_scatter_unused_params"
        elif not (_is_default(raw, "_all_gather_comm") and _is_default(raw, "_reduce_scatter_comm")):
            what = "a custom all-gather or reduce-scatter"
        return None if what is None else f"unit '{self.name or 'root'}' uses {what}"

    def ignored(self) -> str | None:
        """A setting that changes no result and that the compiled schedule does not follow, or None."""
        state = self._state
        if state._states_to_forward_prefetch or state._states_to_backward_prefetch:
            return "set_modules_to_forward_prefetch / set_modules_to_backward_prefetch (prefetch stays one unit ahead)"
        return None


def _is_default(raw: Any, kind: str) -> bool:
    communication = getattr(raw, kind, None)
    return communication is None or type(communication).__name__.startswith("Default")


def _unsupported_layout(raw: Any) -> str | None:
    mesh = raw.mesh_info
    if not isinstance(mesh, FSDPMeshInfo):
        return "strategy 'replicate'"
    if isinstance(mesh, DDPMeshInfo):
        return "hybrid sharding on a 2-D mesh"
    if getattr(mesh, "is_spmd_mesh", False):
        return "dp_mesh_dims"
    if raw._use_post_forward_mesh:
        return "reshard_after_forward as an int"
    return None


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


def find_units(model: nn.Module) -> list[Unit]:
    """Units of an annotated model in `named_modules()` order, those without parameters left out."""
    return [Unit(raw, state, name) for name, state, raw in _raw_groups(model)]


def parameter_names(model: nn.Module, params: Sequence[ShardedParam]) -> list[str]:
    """FQN of each of `params`, the first of its names if it is tied, whether it is registered as its shard or in full.

    Checkpoint wrappers leave no trace.
    """
    modules = {id(module): name for name, module in model.named_modules()}
    names = []
    for param in params:
        module, name = param.owners[0]
        prefix = modules[id(module)]
        names.append((f"{prefix}.{name}" if prefix else name).replace(_WRAPPER_PREFIX, ""))
    return names


def lazy_init(model: nn.Module) -> None:
    """Runs FSDP2's own lazy initialization, for the outermost annotated modules first.

    Raises:
        RuntimeError: FSDP2's, when parameters are still on the meta device.
        ValueError: FSDP2's, when two units share a parameter.
    """
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
                states[name.replace(_WRAPPER_PREFIX, "")] = state
    return states


def _raw_groups(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    for name, state in _states(model).items():
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 on
        if groups is None:
            groups = [state._fsdp_param_group]  # torch 2.11
        for raw in groups:
            if raw is not None and raw.fsdp_params:
                yield name, state, raw


@dataclass
class _HookSlot:
    hooks: Any  # the OrderedDict of a module
    key: int
    hook: Callable[..., Any]
    replacement: Callable[..., Any]


class ForwardHooks:
    """FSDP2's forward hooks of a model: off while it runs compiled, on for FSDP2's own engine.

    While one is off, a hook that can be traced stands at its place, between the hooks of users: it does the casts of
    the unit's mixed-precision policy, or nothing.

    Args:
        model: the annotated model.
        cast_hooks: gets a unit's policy, returns its (pre-forward, post-forward) hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        cast_hooks: Callable[[MixedPrecisionPolicy], tuple[Callable[..., Any], Callable[..., Any]]],
    ) -> None:
        self._slots: list[_HookSlot] = []
        for state in _states(model).values():
            pre, post = cast_hooks(state._mp_policy)
            handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
            if handles[0] is handles[1]:  # a list of modules: one handle holds the pre-hooks, then the post-hooks
                singles = handles[0].handles
                half = len(singles) // 2
                pairs = [(h, pre) for h in singles[:half]] + [(h, post) for h in singles[half:]]
            else:
                pairs = [(handles[0], pre), (handles[1], post)]
            for handle, replacement in pairs:
                hooks = handle.hooks_dict_ref()
                self._slots.append(_HookSlot(hooks, handle.id, hooks[handle.id], replacement))

    def detach(self) -> None:
        """Takes FSDP2's hooks off; casts stay, as hooks that can be traced."""
        for slot in self._slots:
            slot.hooks[slot.key] = slot.replacement

    def attach(self) -> None:
        """Puts FSDP2's hooks back where they were."""
        for slot in self._slots:
            slot.hooks[slot.key] = slot.hook
