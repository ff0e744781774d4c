"""One parameter that FSDP2 shards, read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from graphshard.fsdp2.extensions import AllGatherExtension

# Where FSDP2 holds what is not reduced, at full size, in the unit's reduce dtype. Since torch 2.15 the gradient of the
# gathered parameter is that, and this a property.
_ACCUMULATED = "unsharded_accumulated_grad"


class InUnit(Protocol):
    """What a parameter asks of its unit."""

    @property
    def post_forward_mesh(self) -> DeviceMesh | None:
        """Mesh of the shards after forward, where that is another one."""


@dataclass(frozen=True)
class Layout:
    """A gathered parameter that is a DTensor.

    Attributes:
        mesh: that it is on: of tensor parallelism, or with `dp_mesh_dims` of all.
        placements: on it.
        shape: of the whole tensor.
        stride: likewise.
        data_dims: dims of the mesh that are data-parallel.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data_dims: tuple[int, ...]

    def of_local(self, part: Tensor) -> DTensor:
        """The tensor of which this rank has `part`."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class ShardedParam:
    """One parameter that FSDP2 shards, as this rank holds it."""

    def __init__(self, raw: Any, unit: InUnit) -> None:
        self._raw = raw
        self._unit = unit
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
    def dim(self) -> int:
        """The dim that is sharded."""
        dim: int = self._raw.fsdp_placement.dim
        return dim

    @cached_property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Every (module, name) that the parameter is registered under: more than one when it is tied."""
        place = self._raw._module_info
        return [(place.module, place.param_name), *zip(place.shared_modules, place.shared_param_names, strict=True)]

    @property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Every (dict of a module's parameters, name in it) that the parameter is registered in."""
        return [(module._parameters, name) for module, name in self.owners]

    def register(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` in the place of this one, as FSDP2's engine registers the gathered parameter."""
        for module, name in self.owners:
            module._parameters[name] = parameter

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

    @property
    def offloaded_from(self) -> str:
        """Type of the device that the parameter is gathered on, where its shard is offloaded; else ``""``."""
        kind: str = self._raw.device.type
        return kind if self._raw.offload_to_cpu and kind != "cpu" else ""

    @property
    def layout(self) -> Layout | None:
        """Of the gathered parameter, if that is a DTensor: one that is tensor-parallel, or on a mesh of all axes."""
        raw = self._raw
        spec = None
        if raw.is_dtensor:  # torch 2.11 has the older name
            spec = raw._unsharded_dtensor_spec if hasattr(raw, "_unsharded_dtensor_spec") else raw._tp_spec
        if spec is None:
            return None
        data_dims = tuple(sorted(raw._dp_dim_indices)) if self.on_whole_mesh else ()
        return Layout(spec.mesh, tuple(spec.placements), spec.shape, spec.stride, data_dims)

    @property
    def on_whole_mesh(self) -> bool:
        """Whether the parameter is on a mesh of all axes: `dp_mesh_dims`, from torch 2.13 on."""
        return bool(getattr(getattr(self._raw, "mesh_info", None), "is_spmd_mesh", False))

    def extension(self, world_size: int) -> AllGatherExtension | None:
        """What a tensor subclass has gathered in the parameter's place, over `world_size` shards; None: nothing."""
        has_one = hasattr(self._raw._sharded_local_tensor, "fsdp_pre_all_gather")
        return AllGatherExtension(self._raw, world_size) if has_one else None

    def is_registered(self, parameter: object) -> bool:
        """Whether `parameter` is FSDP2's: sharded, or gathered by its own engine."""
        return parameter is self._raw.sharded_param or parameter is getattr(self._raw, "_unsharded_param", 0)

    def as_registered(self, full: Tensor, trainable: bool) -> nn.Parameter:
        """A gathered tensor as the parameter that stands in the module meanwhile."""
        if (layout := self.layout) is not None:
            full = layout.of_local(full)
        return nn.Parameter(full.detach(), requires_grad=trainable)

    def as_registered_post_forward(self, shard: Tensor) -> nn.Parameter:
        """The post-forward shard `[N]` as the parameter that stands in the module meanwhile."""
        mesh = self._unit.post_forward_mesh
        assert mesh is not None
        count, rank = mesh.size(1), mesh.get_local_rank(1)
        length = -(-self.size[self.dim] // count)
        local = shard.view(*self.size[: self.dim], length, *self.size[self.dim + 1 :])
        own = max(0, min(length, self.size[self.dim] - rank * length))
        local = local.narrow(self.dim, 0, own)
        meta = torch.empty(self.size, device="meta")
        whole = DTensor.from_local(
            local, mesh, (Replicate(), Shard(self.dim)), run_check=False, shape=meta.shape, stride=meta.stride()
        )
        return nn.Parameter(whole.detach(), requires_grad=self.parameter.requires_grad)

    def deliver_grad(self, flat_grad: Tensor) -> None:
        """Puts a reduced gradient `[N]` (the parameter's dtype, padded) on the DTensor parameter, adding to one that
        is there.
        """
        raw = self._raw
        local = flat_grad.view(raw.padded_sharded_param_size)
        if raw.sharded_size != raw.padded_sharded_param_size:
            local = local[: raw.sharded_size[0]]  # other dims than 0 are never padded
        parameter = raw.sharded_param
        if parameter.grad is None:
            parameter.grad = raw.to_sharded_dtensor(local)
        else:
            parameter.grad._local_tensor += local
        # As FSDP2 does: autograd never touches the DTensor parameter, so its hooks are called here.
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)

    def local_grad(self, grad: Tensor) -> Tensor:
        """This rank's part of a gradient of the gathered parameter."""
        found: Tensor = self._raw._get_grad_inner_tensor(grad)
        return found

    def take_unreduced(self) -> Tensor | None:
        """Takes the gradient that FSDP2's own engine holds unreduced, at full size; None: there is none."""
        raw, found = self._raw, None
        if vars(raw).get(_ACCUMULATED) is not None:
            found, raw.unsharded_accumulated_grad = raw.unsharded_accumulated_grad_data, None
        elif hasattr(raw, "_unsharded_param") and raw.unsharded_param.grad is not None:
            found, raw.unsharded_param.grad = raw.unsharded_grad_data, None
        return found

    def give_unreduced(self, grad: Tensor) -> bool:
        """Lets FSDP2's own engine hold a gradient of full size, to which its backwards add.

        Returns:
            Whether it does: it must have gathered the parameter once.
        """
        if not hasattr(self._raw, "_unsharded_param"):
            return False
        if (layout := self.layout) is not None:
            grad = layout.of_local(grad)
        if _ACCUMULATED in vars(self._raw):
            self._raw.unsharded_accumulated_grad = grad
        else:
            self._raw.unsharded_param.grad = grad
        return True
