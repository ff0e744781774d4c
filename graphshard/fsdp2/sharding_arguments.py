"""Models and arguments of `graphshard.compile` that `fully_shard` or the first forward would refuse, refused before
anything is sharded: what is wrong, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Refusal(NamedTuple):
    """One thing that cannot be.

    Attributes:
        kind: of it, a word or two.
        where: FQN of a parameter, module or unit.
        error: to raise.
    """

    kind: str
    where: str
    error: Exception


def check(refusals: Iterator[Refusal]) -> None:
    """Raises the error of the first refusal, if there is one."""
    for refusal in refusals:
        raise refusal.error


def refused_modules(model: nn.Module) -> Iterator[Refusal]:
    """Modules whose parameters no compiled model can have."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            yield Refusal(
                "script module",
                name,
                ValueError(
                    f"compile: module '{name}' is TorchScript's, and has parameters, which its code reads where "
                    "nothing gathers them; want the module that was scripted or traced"
                ),
            )


def refused_parameters(model: nn.Module, ignored: set[nn.Parameter]) -> Iterator[Refusal]:
    """Parameters of a plain model that cannot be sharded."""
    for name, param in model.named_parameters():
        if param in ignored:
            continue
        where = f"compile: parameter '{name}'"
        if isinstance(param, nn.parameter.UninitializedParameter):
            error: Exception = ValueError(f"{where} is not initialized yet; run the lazy module once before")
            yield Refusal("uninitialized", name, error)
        elif param.ndim == 0:
            error = ValueError(f"{where} is a scalar; make it a tensor of one element, shape [1]")
            yield Refusal("scalar", name, error)
        elif param.layout is not torch.strided or not param.is_contiguous():
            error = NotImplementedError(
                f"{where} of shape {tuple(param.shape)} has strides {param.stride()}, not contiguous ones; register a "
                "contiguous copy"
            )
            yield Refusal("strides", name, error)
        else:
            yield from refused_tensor(name, param)


def refused_tensor(name: str, param: Tensor) -> Iterator[Refusal]:
    """What no program can gather, of a parameter of a plain model, or of its sharded local tensor."""
    where = f"compile: parameter '{name}'"
    if param.is_complex():
        error = ValueError(
            f"{where} is {param.dtype}, which no collective of a program sends; want it real, as "
            "torch.view_as_real(parameter), or in ignored_params"
        )
        yield Refusal("complex", name, error)
    if not param.dtype.is_floating_point and not param.is_complex() and torch.__version__ < "2.12":
        error = ValueError(
            f"{where} is {param.dtype}, and FSDP2 of torch 2.11 shards floating-point numbers only; want a "
            "buffer, or it in ignored_params"
        )
        yield Refusal("integer", name, error)
    local: Any = local_part(param)
    if is_traceable_wrapper_subclass(local) and not has_extension(param):
        error = ValueError(
            f"{where} is a {type(local).__name__}, which stands for other tensors and has no fsdp_pre_all_gather "
            "that says what of them is sent; want one, a plain tensor, or it in ignored_params"
        )
        yield Refusal("tensor subclass", name, error)


def has_extension(param: Tensor) -> bool:
    """Whether a parameter's tensor says what is gathered in its place."""
    return hasattr(local_part(param), "fsdp_pre_all_gather")


def local_part(param: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    if not isinstance(param, DTensor):
        return param
    with torch.no_grad():
        return param.to_local()


def refused_devices(model: nn.Module, device_type: str) -> Iterator[Refusal]:
    """Parameters that are elsewhere than the mesh is."""
    for name, param in model.named_parameters():
        if param.device.type not in ("meta", device_type):
            error = ValueError(
                f"compile: parameter '{name}' is on {param.device.type}, but the mesh is on {device_type}; move the "
                "model first"
            )
            yield Refusal("device", name, error)


def refused_dtypes(unit: str, trainable: Mapping[str, torch.dtype]) -> Iterator[Refusal]:
    """Trainable parameters of one unit that are not of one dtype.

    Args:
        unit: its name, ``""`` for the root.
        trainable: dtype of each by FQN.
    """
    first: dict[torch.dtype, str] = {}
    for name, dtype in trainable.items():
        first.setdefault(dtype, name)
    if len(first) > 1:
        said = ", ".join(f"{dtype} ('{name}')" for dtype, name in first.items())
        error = ValueError(
            f"unit '{unit or 'root'}' has trainable parameters of several dtypes, {said}, and FSDP2 reduces those of a "
            "unit together: want one dtype (mp_policy casts what is gathered and reduced), others frozen, or units "
            "that part them"
        )
        yield Refusal("mixed dtypes", unit, error)


def refused_policy(name: str, param: Tensor, param_dtype: torch.dtype | None) -> Iterator[Refusal]:
    """A trainable parameter of 16 bits that a policy would have gathered, and computed with, in float32."""
    if param_dtype is torch.float32 and param.requires_grad and param.dtype in (torch.float16, torch.bfloat16):
        error = ValueError(
            f"compile: mp_policy: got param_dtype=torch.float32 for parameter '{name}', which is trained in "
            f"{param.dtype}: twice the bytes would be sent, and updates rounded to 16 bits all the same; want "
            f"model.float() before (with param_dtype={param.dtype} to compute in that), or no param_dtype"
        )
        yield Refusal("policy", name, error)


def check_policies(mp_policy: MixedPrecisionPolicy | None, offload_policy: OffloadPolicy | None) -> None:
    """Refuses what torch takes in a policy, and fails at later."""
    for name, dtype in ({} if mp_policy is None else vars(mp_policy)).items():
        whole = isinstance(dtype, torch.dtype) and not dtype.is_floating_point
        if name.endswith("dtype") and (whole or isinstance(dtype, (str, int))):
            raise TypeError(f"compile: mp_policy: got {name}={dtype!r}, want a floating-point torch.dtype or None")
    pins = isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory
    if pins and not torch.accelerator.is_available():
        raise ValueError("compile: offload_policy: got pin_memory=True without an accelerator, want pin_memory=False")


def check_reshard(count: int, ranks: int) -> None:
    """Refuses a `reshard_after_forward` that does not divide the ranks of the mesh."""
    if not 1 <= count <= ranks or ranks % count:
        raise ValueError(f"compile: reshard_after_forward: got {count}, want a factor of the {ranks} ranks of the mesh")


def refused_placements(
    parameters: Iterable[tuple[str, nn.Parameter]],
    ranks: int,
    placement_of: Callable[[nn.Parameter], Any],
    ignored: set[nn.Parameter],
) -> Iterator[Refusal]:
    """What the user's `shard_placement_fn` says, where it cannot be done.

    Args:
        parameters: with their FQNs.
        ranks: that a parameter is sharded over.
        placement_of: the user's.
        ignored: parameters that are not sharded.
    """
    for name, param in parameters:
        try:
            placement = None if param in ignored else placement_of(param)
        except Exception as raised:
            raised.add_note(f"compile: shard_placement_fn: it was called for '{name}' of shape {tuple(param.shape)}")
            raise
        if placement is None or hasattr(placement, "mesh_info") or isinstance(param, DTensor):
            continue  # FSDP2's default; one with a mesh of its own; one whose local size decides
        where = f"compile: shard_placement_fn of parameter '{name}' of shape {tuple(param.shape)}"
        if not isinstance(placement, Shard):
            yield Refusal("placement", name, ValueError(f"{where}: got {placement!r:.80}, want a Shard or None"))
            continue
        dim = placement.dim + param.ndim * (placement.dim < 0)
        if not 0 <= dim < param.ndim:
            error: Exception = ValueError(f"{where}: got {placement}, want a dim in [{-param.ndim}, {param.ndim - 1}]")
            yield Refusal("placement", name, error)
        elif dim > 0 and param.shape[dim] % ranks:
            error = NotImplementedError(
                f"{where}: got {placement}, which does not divide evenly by {ranks} ranks; only dim 0 may be uneven"
            )
            yield Refusal("placement", name, error)


def shard_count(mesh: DeviceMesh) -> int:
    """Ranks that a parameter is sharded over: those of the last axis."""
    return mesh.size(mesh.ndim - 1)
