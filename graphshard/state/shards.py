"""Leaves: plain tensors that stand for sharded parameters while a model runs compiled.

A leaf shares storage with FSDP2's padded flat shard, so it has one size on all ranks and optimizer steps show in it.
Autograd puts a reduced gradient on the leaf; a hook hands it on to the DTensor parameter. A shard also holds what
outlives a program: a gathered value that stays, gradients that are not reduced yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.spmd_parameters import key_of
from graphshard.compat.dynamo import uncaptured
from graphshard.compat.tensors import keep_static, version
from graphshard.fsdp2 import ShardedParam, Unit
from graphshard.graph.ir import ParamRef
from graphshard.graph.markers import ShardSpec
from graphshard.reporting.report import Report

# What a shard holds, as bits: programs are chosen by them.
RESIDENT, POST_FORWARD, HELD, PENDING, PARTIAL = 1, 2, 4, 8, 16


class Shard:
    """One sharded parameter of a compiled model.

    Attributes:
        leaf: flat padded shard `[N]`, a leaf of autograd.
        extension: what a tensor subclass has gathered in the parameter's place; or None.
        full: the gathered parameter, or what is gathered in its place, while it stays between programs; or None.
        post_forward: its shard over a smaller group, between forward and backward; or None.
        held: accumulated gradient that is not reduced yet, full size, in the unit's reduce dtype; or None.
        pending: the sum of gradients of calls that the running backward reached, while it will reach another call;
            full size, in the gradient's dtype; or None.
        grad_came: is called when user code's use of the gathered parameter brings a gradient, which is pending then.
        partial: gradient `[N]` reduced over the shards but not over their copies, in the reduce dtype; or None.
        is_whole: whether the shard is the gathered parameter: no other shards, no cast, no other device.
    """

    def __init__(self, param: ShardedParam, unit: Unit, fqn: str, index: int, report: Report) -> None:
        self.param = param
        self.unit = unit
        self.fqn = fqn
        self.index = index
        self.report = report
        self.full: Tensor | None = None
        self.post_forward: Tensor | None = None
        self.held: Tensor | None = None
        self.pending: Tensor | None = None
        self.partial: Tensor | None = None
        self._versions = (0, 0)  # how often it was written, when it was gathered
        self._registered: nn.Parameter | None = None  # in place of FSDP2's sharded parameter
        self._is_hidden = False  # what stays gathered, for modules
        self._trains: bool | None = None  # whether it did when the running backward let go of what stayed
        self._whole: nn.Parameter | None = None  # the same, made once, where the shard is whole
        # The last of them that takes gradients; weakly: its memory is that of what was gathered.
        self._watched: weakref.ref[nn.Parameter] | None = None
        self.grad_came: Callable[[Shard], None] = lambda shard: None
        self._layout = param.layout
        self._source = param.flat_shard
        self.extension = param.extension(unit.world_size)
        self.leaf = self._make_leaf()

    def _make_leaf(self) -> Tensor:
        param = self.param
        self._source, self._whole = param.flat_shard, None
        casts = param.param_dtype != self._source.dtype or bool(param.offloaded_from) or self.extension is not None
        self.is_whole = self.unit.world_size == 1 and not casts
        trainable = self.is_trainable
        if self.extension is not None:  # nothing reads its values
            one = torch.empty(1, dtype=self._source.dtype, device=self._source.device)
            leaf = one.expand(self._source.numel())
        elif self._source.numel():
            leaf = self._source.detach()
        else:  # there would be no address to be found by: it has one element's memory of its own
            leaf = self._source.detach().new_empty(1)[:0]
        leaf.requires_grad_(trainable)
        keep_static(leaf)
        if trainable:
            leaf.register_post_accumulate_grad_hook(partial(_hand_over, weakref.ref(self)))  # type: ignore[no-untyped-call]
        return leaf

    def renew(self) -> None:
        """Makes a new leaf if the parameter's storage or `requires_grad` changed: `to(dtype)`,
        `load_state_dict(assign=True)`. What stays gathered does so if the storage is the same.

        Raises:
            RuntimeError: if an unreduced gradient is held, and the storage changed.
        """
        same = self.param.flat_shard is self._source
        if same and self.is_trainable == self.leaf.requires_grad:
            return
        if not same and (self.held is not None or self.partial is not None):
            raise RuntimeError(
                f"{self.fqn}: its parameter changed while an unreduced gradient was held; run one backward with "
                "set_requires_gradient_sync(True) before"
            )
        if not same:
            self.reshard()
        self.leaf = self._make_leaf()

    def marker_args(self) -> tuple[Any, ...]:
        """Arguments of `graphshard::unshard` for this parameter, and what else makes of it what modules see: a
        tensor-parallel layout, an extension; None: nothing.
        """
        layout: tuple[Any, ...] | None = None
        if (on := self._layout) is not None:
            size, stride = ("x".join(map(str, numbers)) for numbers in (on.shape, on.stride))
            layout = (on.mesh, on.placements, size, stride, key_of(on))
        extension: tuple[Any, ...] | None = None
        if (own := self.extension) is not None:
            for tensor in (own.wire, *own.tensors):
                keep_static(tensor)
            extension = (own.wire, str(self.gather_spec()), own.kind, own.tensors)
        more = (layout, extension) if layout or extension else None
        return self.leaf, str(self.spec()), more

    @property
    def source(self) -> Tensor:
        """What is gathered: the leaf, or what a tensor subclass sends in its place."""
        return self.leaf.detach() if self.extension is None else self.extension.wire

    def gather_spec(self) -> ShardSpec:
        """How what is gathered is sharded."""
        if self.extension is None:
            return self.spec()
        wire, unit = self.extension.wire, self.unit
        size = (wire.numel() * unit.world_size,)
        return ShardSpec(size, wire.dtype, wire.dtype, 0, unit.world_size, unit.group_name)

    def spec(self) -> ShardSpec:
        """How this parameter is sharded, and its gradient reduced."""
        param, unit = self.param, self.unit
        return ShardSpec(
            param.size,
            param.param_dtype,
            param.reduce_dtype,
            param.dim,
            unit.world_size,
            unit.group_name,
            unit.replicas,
            unit.replicate_group_name,
            param.offloaded_from,
        )

    def ref(self) -> ParamRef:
        """What passes may know of this parameter."""
        return ParamRef(
            self.fqn,
            self.unit.name,
            self.index,
            self.param.size,
            self.leaf.numel(),
            self.param.parameter.dtype,
            self.param.adds_in_reduce_dtype,
            self.param.dim,
            self.unit.post_forward,
        )

    @property
    def bits(self) -> int:
        """What is held now."""
        return (
            (self.full is not None) * RESIDENT
            | (self.post_forward is not None) * POST_FORWARD
            | (self.held is not None) * HELD
            | (self.pending is not None) * PENDING
            | (self.partial is not None) * PARTIAL
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of what is held at full size."""
        return sum(value.nbytes for value in (self.full, self.held, self.pending) if value is not None)

    # -- gathered values that stay

    def as_seen(self, full: Tensor) -> Tensor:
        """What modules see of a gathered value, but for tensor parallelism."""
        own = self.extension
        return full if own is None else own.whole(full)

    def stay(self, full: Tensor, written: tuple[int, int] | None = None) -> None:
        """Keeps a gathered value for the programs to come, and registers it in place of the sharded parameter.
        `written`: how often that was written when it was gathered; None: as it is now.
        """
        trainable = self.is_trainable
        self.keep(full, written)
        self._register(self.param.as_registered(self.as_seen(full), trainable))

    def keep(self, full: Tensor, written: tuple[int, int] | None = None) -> None:
        """Keeps a gathered value for the next program, unregistered: it is for that program alone."""
        self.full, self.post_forward, self._versions = full, None, written or self.written()
        self._is_hidden = False

    def hide(self) -> None:
        """Registers the sharded parameter again, though what was gathered stays for the programs to come."""
        if self.full is not None and self._registered is not None:
            self.param.register(self.param.parameter)
            self._registered, self._is_hidden = None, True

    def show(self) -> None:
        """Registers what stays gathered."""
        if self._is_hidden and self.full is not None:
            self.stay(self.full, self._versions)

    @property
    def is_for_one_program(self) -> bool:
        """Whether what is gathered is for the next program alone."""
        return self.full is not None and self._registered is None and not self._is_hidden

    def stay_whole(self) -> None:
        """The same for a parameter that is whole on this rank: nothing is kept."""
        if self._registered is None:
            if self._whole is None:
                self._whole = self.param.as_registered(self.leaf.detach().view(self.param.size), self.is_trainable)
            self._whole.requires_grad_(self.is_trainable)
            self._register(self._whole)

    def stay_post_forward(self, shard: Tensor) -> None:
        """Keeps a post-forward shard `[n]`."""
        self.full, self.post_forward, self._versions = None, shard, self.written()
        if self.extension is None:  # else it is no part of the parameter
            self._register(self.param.as_registered_post_forward(shard))

    def is_outdated(self) -> bool:
        """Whether the parameter was written since what stays was gathered."""
        return (self.full is not None or self.post_forward is not None) and self.written() != self._versions

    def written(self) -> tuple[int, int]:
        """How often the parameter was written: the same numbers mean the same values."""
        # Optimizers write through the DTensor, which counts them alone; others write its local tensor.
        local = self.leaf if self.extension is None else self.extension.sharded
        return version(self.param.parameter), version(local)

    def reshard(self) -> None:
        """Frees what stayed, and registers the sharded parameter."""
        self.full = self.post_forward = None
        self._is_hidden = False
        if self._registered is not None:
            self._registered = None
            self.param.register(self.param.parameter)

    def let_go(self) -> None:
        """The same in a backward, whose gradients still come by the flag of what stayed."""
        if self._registered is not None:
            self._trains = self.is_trainable
        self.reshard()

    def end_backward(self) -> None:
        """A backward ends: all its gradients have come."""
        self._trains = None

    def _register(self, parameter: nn.Parameter) -> None:
        watched = None if self._watched is None else self._watched()
        if parameter.requires_grad and parameter is not self._registered and parameter is not watched:
            self._watched = weakref.ref(parameter)
            parameter.register_post_accumulate_grad_hook(partial(_take, weakref.ref(self)))  # type: ignore[no-untyped-call]
        self._registered = parameter
        self.param.register(parameter)

    @property
    def registered(self) -> nn.Parameter:
        """What stands for this parameter in its module now."""
        return self.param.parameter if self._registered is None else self._registered

    def is_registered(self, parameter: object) -> bool:
        """Whether `parameter` stands for this one, sharded or gathered."""
        return parameter is not None and (parameter is self._registered or self.param.is_registered(parameter))

    # -- gradients

    @property
    def is_trainable(self) -> bool:
        """Whether the parameter gets gradients now: it may have been frozen since forward. A gathered one that stays
        has a flag of its own, until it is resharded, as in FSDP2.
        """
        if self._trains is not None:
            return self._trains
        gathered = None if self.post_forward is not None else self._registered
        return (self.param.parameter if gathered is None else gathered).requires_grad

    def hold(self, grad: Tensor, shared: bool) -> None:
        """Accumulates an unreduced gradient, as FSDP2 does: the first in the reduce dtype, then added in place. What is
        held stays when the parameter is frozen, and is reduced; more is not added.

        Args:
            grad: full gradient.
            shared: whether something else may hold memory of `grad`.
        """
        if not self.is_trainable:
            return
        if self.held is None:
            held = grad.to(self.param.reduce_dtype).contiguous()  # a convolution's comes in other strides
            self.held = held.clone() if held is grad and shared else held
        else:
            self.held += grad.to(self.param.reduce_dtype) if self.param.adds_in_reduce_dtype else grad

    def add_pending(self, grad: Tensor, shared: bool) -> None:
        """Adds the gradient of one call to those of other calls in the same backward, as autograd does."""
        if self.pending is None:
            pending = grad.contiguous()
            self.pending = pending.clone() if pending is grad and shared else pending
        else:
            self.pending = self.pending + grad

    def deliver(self, grad: Tensor) -> None:
        """Puts the reduced gradient of a backward on the parameter, unless it was frozen since forward."""
        if self.is_trainable:
            self.param.deliver_grad(grad)

    @property
    def cannot_hand_held(self) -> bool:
        """Whether an unreduced gradient is held that FSDP2's own engine could not add to: its placements over the
        data-parallel axes are known in a trace alone.
        """
        return self.held is not None and self.param.on_whole_mesh

    def hand_held(self) -> None:
        """Hands the unreduced gradient to FSDP2's own engine, as soon as that can hold it."""
        if self.cannot_hand_held:
            return
        if self.held is not None and self.param.give_unreduced(self.held):
            self.held = None

    def take_held(self) -> bool:
        """Takes the unreduced gradient that FSDP2's own engine holds; returns whether there was one."""
        if (grad := self.param.take_unreduced()) is None:
            return False
        grad = grad.to(self.param.reduce_dtype).contiguous()
        self.held = grad if self.held is None else self.held + grad
        return True

    def drop_unreduced(self, held: bool) -> bool:
        """Forgets what a failed backward has left. `held`: what is held, too. Returns whether there was anything."""
        found = self.pending is not None or (held and self.held is not None)
        self.end_backward()
        self.pending = None
        if held:
            self.held = None
        return found

    def drop_grads(self) -> None:
        """Forgets all that is not reduced yet."""
        self.end_backward()
        self.held = self.pending = self.partial = None


@uncaptured
def _hand_over(shard_of: weakref.ref[Shard], leaf: Tensor) -> None:
    """The gradient hook of a leaf. It does not keep the shard alive: Python cannot see a cycle through a tensor's
    hooks.
    """
    grad, leaf.grad = leaf.grad, None
    shard = shard_of()
    if grad is not None and shard is not None:  # None: the program left it unreduced, or none flowed
        shard.deliver(grad)


@uncaptured
def _take(shard_of: weakref.ref[Shard], parameter: Tensor) -> None:
    """The gradient hook of a gathered parameter that stays: user code has used it around the model's forward."""
    grad, parameter.grad = parameter.grad, None
    shard = shard_of()
    if grad is not None and shard is not None:
        shard.add_pending(shard.param.local_grad(grad), shared=True)
        shard.grad_came(shard)
