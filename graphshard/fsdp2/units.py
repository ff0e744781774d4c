"""One unit, what one `fully_shard` or `replicate` call manages, read: its layout and the settings that users flip."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from graphshard.compat.groups import register_work
from graphshard.fsdp2.params import ShardedParam
from graphshard.fsdp2.settings import DEFAULT_SETTINGS, UnitSettings

_OPERATORS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}


class Unit:
    """What one `fully_shard` or `replicate` call manages: the parameters that are gathered and reduced together.

    Args:
        raw: FSDP2's parameter group.
        state: FSDP2's state of the module.
        name: of the unit: its module's FQN, ``""`` for the root.
    """

    def __init__(self, raw: Any, state: Any, name: str) -> None:
        self._raw = raw
        self._state = state
        self.name = name
        self.key = ""  # of what users supplied, for programs; set by `sharded_units`
        self.position = 0  # among the model's units; set by `sharded_units`
        self.names: dict[int, list[str]] = {}  # id of an FSDP2 state -> names of its units; set by `sharded_units`
        self.params = [ShardedParam(param, self) for param in raw.fsdp_params]
        self._seen: tuple[object, ...] = ()
        self._settings = DEFAULT_SETTINGS
        self._by_direction = DEFAULT_SETTINGS, DEFAULT_SETTINGS

    # -- layout: it never changes

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of the unit: several if `fully_shard` was called on a list."""
        modules: tuple[nn.Module, ...] = tuple(self._raw.modules)
        return modules

    @property
    def state_id(self) -> int:
        """Identity of FSDP2's state: units of one call share it."""
        return id(self._state)

    @property
    def world_size(self) -> int:
        """Number of shards."""
        mesh = self._raw.mesh_info
        return int(mesh.shard_mesh_size) if isinstance(mesh, FSDPMeshInfo) else 1

    @property
    def group_name(self) -> str:
        """Name of the process group that shards are gathered and reduced over, ``""`` if nothing is sharded."""
        mesh = self._raw.mesh_info
        return str(mesh.shard_process_group.group_name) if isinstance(mesh, FSDPMeshInfo) else ""

    @property
    def replicas(self) -> int:
        """Number of copies of each shard."""
        mesh = self._raw.mesh_info
        return int(mesh.replicate_mesh_size) if isinstance(mesh, DDPMeshInfo) else 1

    @property
    def replicate_group_name(self) -> str:
        """Name of the process group of the copies, ``""`` if there are none."""
        mesh = self._raw.mesh_info
        return str(mesh.replicate_process_group.group_name) if isinstance(mesh, DDPMeshInfo) else ""

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all process groups that its collectives go over."""
        after_forward = self.post_forward
        return tuple(filter(None, (self.group_name, self.replicate_group_name, *(after_forward or ())[1:])))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold a part of its parameters, or a copy, in order."""
        mesh: DeviceMesh = self._raw.mesh_info.mesh
        return tuple(sorted(int(rank) for rank in mesh.mesh.flatten().tolist()))

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        device: torch.device = self._raw.device
        return device

    # -- flags, as they stand now

    @property
    def reduce_grads(self) -> bool:
        """Of `set_requires_gradient_sync`."""
        flag: bool = self._raw.reduce_grads
        return flag

    @property
    def reduce_unused(self) -> bool:
        """Of `set_reduce_scatter_unused_params`."""
        return bool(getattr(self._raw, "reduce_scatter_unused_params", False))

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are freed after forward, if only for shards over a smaller group."""
        reshard: bool = self._raw._reshard_after_forward
        return reshard

    @property
    def reshard_after_backward(self) -> bool:
        """Of `set_reshard_after_backward`."""
        flag: bool = self._raw.reshard_after_backward
        return flag

    @property
    def post_forward_mesh(self) -> DeviceMesh | None:
        """2-D mesh whose second axis the parameters are sharded over after forward (`reshard_after_forward` as an
        int); None where that is the unit's own group, or nothing.
        """
        raw = self._raw
        if not raw._use_post_forward_mesh or not isinstance(raw.mesh_info, FSDPMeshInfo):
            return None
        mesh: DeviceMesh = raw.post_forward_mesh_info.mesh
        return mesh

    @property
    def post_forward(self) -> tuple[int, str] | None:
        """(Number of shards after forward, name of their group), where `post_forward_mesh` is not None."""
        if self.post_forward_mesh is None:
            return None
        info = self._raw.post_forward_mesh_info
        return info.shard_mesh_size, info.shard_process_group.group_name

    @property
    def post_forward_rank(self) -> int:
        """This rank among the shards after forward."""
        rank: int = self._raw.post_forward_mesh_info.shard_mesh_rank
        return rank

    def settings(self) -> UnitSettings:
        """What shapes a program; the same object as long as nothing changed."""
        raw, state = self._raw, self._state
        seen = (
            getattr(raw, "gradient_divide_factor", None),
            getattr(raw, "force_sum_reduction_for_comms", False),
            raw.all_reduce_grads,
            raw._all_reduce_hook,
            getattr(raw, "_all_gather_comm", None),
            getattr(raw, "_reduce_scatter_comm", None),
            getattr(raw, "reduce_scatter_max_input_buffers", 1),
            getattr(raw.mesh_info, "reduce_scatter_process_group", None),
            *state._states_to_forward_prefetch,
            None,
            *state._states_to_backward_prefetch,
        )
        if seen != self._seen:
            self._seen, self._settings = seen, self._read_settings(*seen[:8])
            self._by_direction = self._settings.of_forward(), self._settings.of_backward()
        return self._settings

    def forward_settings(self) -> UnitSettings:
        """Those of them that shape a forward program."""
        self.settings()
        return self._by_direction[0]

    def backward_settings(self) -> UnitSettings:
        """Those of them that shape a backward program."""
        self.settings()
        return self._by_direction[1]

    def _read_settings(
        self,
        factor: Any,
        force_sum: Any,
        all_reduce: Any,
        hook: Any,
        gather: Any,
        scatter: Any,
        buffers: Any,
        group: Any,
    ) -> UnitSettings:
        state = self._state
        return UnitSettings(
            factor,
            force_sum,
            all_reduce or self.replicas == 1,
            self.key if hook is not None else "",
            "" if _is_default(gather) else self.key,
            "" if _is_default(scatter) else self.key,
            buffers,
            "" if group is None else group.group_name,
            self._names_of(state._states_to_forward_prefetch),
            self._names_of(state._states_to_backward_prefetch),
        )

    def _names_of(self, states: list[Any]) -> tuple[str, ...]:
        return tuple(name for state in states for name in self.names.get(id(state), ()))

    # -- FSDP2's own engine

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are registered as their shards, as far as FSDP2's engine knows."""
        sharded: bool = self._raw.is_sharded
        return sharded

    def reshard(self) -> None:
        """Frees parameters that FSDP2's own engine gathered."""
        self._raw.reshard()

    @property
    def holds_partial(self) -> bool:
        """Whether FSDP2's own engine holds gradients that it has reduced over shards, not yet over their copies."""
        return self._raw._partial_reduce_output is not None

    # -- what users supplied (see `user_comms`)

    def all_gather(self, flat: Tensor, world_size: int) -> Tensor:
        """`[n]` of this rank -> `[W * n]`, by the user's all-gather; its input is a part of its output, as FSDP2's.

        `wait_tensor` waits for what is under way.
        """
        comm, group = self._raw._all_gather_comm, self._raw.mesh_info.shard_process_group
        if world_size != group.size():
            group = self._raw.post_forward_mesh_info.shard_process_group
        numel = flat.numel()
        full: Tensor = comm.allocate((numel * world_size,), dtype=flat.dtype, device=flat.device)
        own = full.narrow(0, numel * group.rank(), numel)
        own.copy_(flat)
        _let_wait(full, comm(output_tensor=full, input_tensor=own, group=group, async_op=_is_torchs(comm)))
        return full

    def reduce_scatter(self, flat: Tensor, op: str) -> Tensor:
        """`[W * n]` -> `[n]` of this rank, by the user's reduce-scatter, likewise."""
        comm, group = self._raw._reduce_scatter_comm, self._raw._reduce_scatter_process_group
        whole = comm.allocate((flat.numel(),), dtype=flat.dtype, device=flat.device)
        whole.copy_(flat)
        reduced: Tensor = comm.allocate((flat.numel() // group.size(),), dtype=flat.dtype, device=flat.device)
        options = {"async_op": True} if _is_torchs(comm) else {}
        _let_wait(reduced, comm(output_tensor=reduced, input_tensor=whole, group=group, op=_OPERATORS[op], **options))
        return reduced

    def hook_all_reduce(self, reduced: Tensor) -> None:
        """Calls the user's all-reduce hook on a reduced bucket `[n]`."""
        self._raw._all_reduce_hook(reduced)


def _is_default(communication: object) -> bool:
    return communication is None or type(communication).__name__ in ("DefaultAllGather", "DefaultReduceScatter")


def _is_torchs(communication: object) -> bool:
    """Whether it is of torch itself, with other memory. One of a user's own may change what it has sent or received,
    and is asked to be done with that, as by FSDP2.
    """
    return type(communication).__module__.startswith("torch.")


def _let_wait(result: Tensor, work: Any) -> None:
    """Lets `wait_tensor(result)` wait for a work of torch's; one of another kind is awaited here."""
    if isinstance(work, dist.Work):
        register_work(result, work)
    elif work is not None:
        work.wait()
