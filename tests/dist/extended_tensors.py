"""Tensor subclasses with all-gather extensions: one that trains, one of a frozen base that sends several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# What FSDP2 does to a parameter while it shards it, and what must leave it what it is.
KEEP = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
}


class Wrapped(torch.Tensor):
    """A tensor around another; sums, optimizers and copies see that one."""

    def __new__(cls, data: Tensor, setting: float = 1.0) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor, setting: float = 1.0) -> None:
        self.data_inside = data
        self.setting = setting

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["data_inside"], self.setting

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], setting: float, size: Any, stride: Any) -> Wrapped:
        return cls(inner["data_inside"], setting)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.data_inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = []

        def inside(tensor: Wrapped) -> Tensor:
            settings.append(tensor.setting)
            return tensor.data_inside

        args, kwargs = tree_map_only(Wrapped, inside, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in KEEP:
            return out
        return tree_map_only(Tensor, lambda tensor: cls(tensor, settings[0]), out)


class Rounded(Wrapped):
    """Is gathered in eight bits, scaled by the largest weight of all ranks: its hook communicates."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> Any:
        (sent,), metadata = _rounded(self, mesh)
        missing = -(-outer_size[0] // mesh.size()) - len(sent)  # FSDP2 wants all shards of one size
        return (torch.cat([sent, sent.new_zeros(missing, *outer_size[1:])]),), metadata

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        full = outputs[0].to(param_dtype) * metadata["scale"].to(param_dtype) * (metadata["steps"] / 100)
        return given(full, out)


class RoundedForOne(Rounded):
    """The same, by the older signature of the hook."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return _rounded(self, mesh)


def _rounded(tensor: Wrapped, mesh: DeviceMesh) -> Any:
    largest = tensor.data_inside.abs().max() if tensor.data_inside.numel() else torch.zeros(())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    scale = largest.clamp(min=1e-6) / 100
    scaled = (tensor.data_inside / scale * tensor.setting).round().clamp(-127, 127)
    return (scaled.to(torch.int8),), {"scale": scale, "steps": 100}


class Packed(Wrapped):
    """Sends two tensors of other dtypes and sizes than its own: bytes, and a scale for each row of its shard."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        rows = self.data_inside.flatten(1)
        scales = rows.abs().amax(1).clamp(min=1e-6) / 7
        return ((rows / scales[:, None]).round().to(torch.int8), scales), (tuple(self.shape[1:]),)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        rows, scales = outputs
        full = (rows.to(param_dtype) * scales.to(param_dtype)[:, None]).view(-1, *metadata[0])
        return given(full, out)


def given(full: Tensor, out: Tensor | None) -> Any:
    """What a hook returns that makes `full`."""
    if out is None:
        return full, (full,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(full[: len(out)])
    return None


def extended(
    model: nn.Module, make: Callable[[Tensor], Wrapped], names: Sequence[str] = ("weight",), frozen: bool = False
) -> nn.Module:
    """`model`, its linear layers' parameters of these names made by `make`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name in names:
                own = getattr(module, name)
                if not isinstance(own.data, Wrapped):
                    new = nn.Parameter(make(own.detach()), requires_grad=own.requires_grad and not frozen)
                    setattr(module, name, new)
    return model
