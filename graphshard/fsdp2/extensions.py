"""All-gather extensions: what a tensor subclass has FSDP2 gather in the place of a parameter.

FSDP2 calls `fsdp_pre_all_gather` of the sharded tensor before each gather, sends the tensors that it yields, and has
`fsdp_post_all_gather` make the parameter of what arrives and of the metadata that it also yielded. Here the first is
called once before a forward, and what it yields copied to where programs read it; the parameter must not be written
between a forward and its backward (see `ShardTable.check_sent`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Each tensor starts so many bytes into what is sent that it can be seen in any dtype.
_ALIGNMENT = 16
# So many kinds that one parameter was the first of are kept: metadata may differ in every step.
KEPT_KINDS = 16


@dataclass(frozen=True)
class _Sent:
    """One tensor that is sent: where its bytes are in `wire`, and what they are on one rank."""

    offset: int
    num_bytes: int
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Kind:
    """What parameters have in common of which one trace can make another.

    Attributes:
        described: what must be equal: type and context of the sharded tensor, all of the metadata that is no tensor.
        holders: FSDP2's parameters of this kind that live. Any of them can be asked.
    """

    described: tuple[Any, ...]
    sent: tuple[_Sent, ...]
    metadata: tuple[TreeSpec, tuple[Any, ...]]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    world_size: int
    holders: WeakSet[Any]

    def whole(self, holder: Any, gathered: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        spec, leaves = self.metadata
        found = iter(tensors)
        metadata = tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in leaves], spec)
        rows = gathered.view(self.world_size, -1)
        outputs = tuple(_output(rows, sent) for sent in self.sent)
        inner = holder._sharded_local_tensor
        try:
            full, _ = inner.fsdp_post_all_gather(outputs, metadata, self.dtype)
        except Exception as error:
            error.add_note(
                f"graphshard: fsdp_post_all_gather of {type(inner).__name__} is traced; want it to use no tensor but "
                "those that it is given: fsdp_pre_all_gather can pass more of them, in its metadata"
            )
            raise
        if full.size() != self.size or full.stride() != self.stride:  # padded, where shards are uneven
            full = torch.as_strided(full, self.size, self.stride, storage_offset=0)
        return full  # type: ignore[no-any-return]


class _TensorHere:
    """Stands for a tensor in metadata."""


_TENSOR = _TensorHere()
_KINDS: dict[str, _Kind] = {}
_numbers = itertools.count()


def _output(rows: Tensor, sent: _Sent) -> Tensor:
    """What `fsdp_post_all_gather` is given of one tensor: those of all ranks, behind each other.

    Args:
        rows: `[W, bytes]`, uint8.
        sent: which bytes.
    """
    own = rows.narrow(1, sent.offset, sent.num_bytes).reshape(-1)
    return own.view(sent.dtype).view(-1, *sent.size[1:])


class AllGatherExtension:
    """What one parameter's tensor subclass has gathered instead of it.

    Args:
        raw: FSDP2's parameter.
        world_size: number of shards.

    Attributes:
        wire: `[n]`, uint8, what this rank sends: all tensors of `fsdp_pre_all_gather`, each padded to 16 bytes where
            there are several.
        tensors: copies of the tensors in its metadata.
        kind: name of what else must be known to make the parameter: for `whole_parameter`.
        kinds: how often it has become another.
        is_of: how often the parameter had been written when `wire` was.
    """

    def __init__(self, raw: Any, world_size: int) -> None:
        self._raw = raw
        self._world_size = world_size
        self._described: tuple[Any, dict[str, Any], tuple[Any, ...]] | None = None
        self.wire: Tensor = torch.empty(0, dtype=torch.uint8, device=raw.device)
        self.tensors: tuple[Tensor, ...] = ()
        self.kind = ""
        self.kinds = 0
        self._own_kinds: list[str] = []
        self.is_of = (0, 0)

    @property
    def sharded(self) -> Tensor:
        """The subclass's tensor, this rank's part of the parameter."""
        local: Tensor = self._raw._sharded_local_tensor
        return local

    def whole(self, gathered: Tensor) -> Tensor:
        """The parameter as modules see it. `gathered`: `[W * n]`, uint8: `wire` of all ranks."""
        return _KINDS[self.kind].whole(self._raw, gathered, self.tensors)

    @torch.no_grad()
    def refresh(self, written: tuple[int, int]) -> bool:
        """Asks the sharded tensor what to send, now; returns whether `wire`, `tensors` or `kind` are others than they
        were.

        The tensor may communicate for that itself, about an amax: all ranks have to call this together.

        Args:
            written: how often the parameter was.
        """
        raw = self._raw
        inputs: list[Tensor] = raw.all_gather_inputs  # flat; calls fsdp_pre_all_gather
        sizes, metadata = raw._extensions_data.all_gather_input_sizes, raw._extensions_data.all_gather_metadata
        raw._extensions_data.clear()
        self.is_of = written
        leaves, spec = tree_flatten(metadata)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        sent, num_bytes = _laid_out(inputs, sizes)
        kind = self._kind((sent, spec, constants))
        same = kind == self.kind and _alike(tensors, self.tensors)
        if not same:
            self.kinds += kind != self.kind
            self.kind = kind
            self.wire = torch.empty(num_bytes, dtype=torch.uint8, device=raw.device)
            self.tensors = tuple(torch.empty_like(tensor, requires_grad=False) for tensor in tensors)
        for part, tensor in zip(sent, inputs, strict=True):
            # By `data`: what backward is to read again is written, and autograd would refuse that.
            self.wire.data[part.offset : part.offset + part.num_bytes].copy_(tensor.contiguous().view(torch.uint8))
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.data.copy_(tensor)
        return not same

    def _kind(self, layout: tuple[Any, ...]) -> str:
        raw = self._raw
        inner = raw._sharded_local_tensor
        # Cheaply, for on a GPU a context may wait for it: a tensor of which no attribute has changed has the same.
        settings = {name: value for name, value in vars(inner).items() if not isinstance(value, Tensor)}
        if self._described is None or self._described[0] is not inner or not _equal(self._described[1], settings):
            self._described = inner, settings, _context(inner)
        dtype, size = raw.param_dtype or raw.orig_dtype, torch.Size(raw._orig_size)
        stride = tuple(raw._contiguous_orig_stride)
        described = (*self._described[2], *layout, dtype, size, stride, self._world_size)
        if self.kind and _equal(_KINDS[self.kind].described, described):
            return self.kind
        for name, known in [*_KINDS.items()]:
            if not known.holders:
                del _KINDS[name]
            elif _equal(known.described, described):
                known.holders.add(raw)
                return name
        sent, spec, constants = layout
        self._own_kinds.append(name := f"{type(inner).__name__}#{next(_numbers)}")
        if len(self._own_kinds) > KEPT_KINDS:
            _KINDS[self._own_kinds.pop(0)].holders.discard(raw)
        _KINDS[name] = _Kind(described, sent, (spec, constants), dtype, size, stride, self._world_size, WeakSet([raw]))
        return name


def whole_parameter(kind: str, gathered: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The parameter as modules see it, made by the `fsdp_post_all_gather` of a tensor of `kind`.

    Args:
        kind: of an `AllGatherExtension`.
        gathered: `[W * n]`, uint8: `wire` of all ranks.
        tensors: those of the metadata.
    """
    known = _KINDS[kind]
    return known.whole(next(iter(known.holders)), gathered, tensors)


def _context(inner: Tensor) -> tuple[Any, ...]:
    """What tells a subclass's tensor from others, but for its data; itself, where it does not say."""
    flatten = getattr(inner, "__tensor_flatten__", None)
    return (type(inner), flatten()[1] if flatten is not None else object())


def _laid_out(inputs: Sequence[Tensor], sizes: Sequence[torch.Size]) -> tuple[tuple[_Sent, ...], int]:
    found, offset = [], 0
    for tensor, size in zip(inputs, sizes, strict=True):
        found.append(_Sent(offset, tensor.nbytes, tuple(size), tensor.dtype))
        offset += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT if len(inputs) > 1 else tensor.nbytes
    return tuple(found), offset


def _alike(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    def traits(tensor: Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.shape, tensor.dtype, tensor.device

    return [*map(traits, tensors)] == [*map(traits, others)]


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:  # of a user's class
        return False
