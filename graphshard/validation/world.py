"""The ranks of a world that is in this process, and the groups that a graph's collectives are over.

A group of a mesh is known by the distance of its neighbours and their number. Where there are process groups, these are
read off them; where there are none, groups are the axes of a mesh of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.fx import Graph

from graphshard.compat.groups import resolve_process_group
from graphshard.graph.ir import LAUNCHES, PassContext, collective, launches, reductions, spec_of, unshards
from graphshard.validation.unchecked import Unchecked

# More ranks would cost more than they show.
MAX_RANKS = 64


@dataclass(frozen=True)
class World:
    """Ranks from 0 up.

    Attributes:
        size: how many there are.
        groups: by name, the ranks of all of its instances, each in the order of the group.
    """

    size: int
    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group that a rank is in."""
        if group not in self.groups:
            raise Unchecked(f"nothing says which ranks process group {group!r} has")
        return next(ranks for ranks in self.groups[group] if rank in ranks)


def world_of(graphs: Iterable[Graph], ctx: PassContext) -> World:
    """The world that graphs run in.

    Raises:
        Unchecked: there is none of at most `MAX_RANKS` ranks.
    """
    sizes, inner = dict[str, int](), dict[str, int]()
    for graph in graphs:
        for node in (*unshards(graph), *reductions(graph)):
            spec = spec_of(node)
            _add(sizes, spec.group, spec.world_size)
            _add(sizes, spec.replicate_group, spec.replicas)
        for node in launches(graph):
            found = collective(node)
            if found is not None:
                _add(sizes, found.group, found.world_size)
            elif LAUNCHES[node.target] != "all_reduce":
                _add(sizes, str(node.args[-1]), node.args[-2] if isinstance(node.args[-2], int) else 0)
    for param in ctx.params.values():
        if param.post_forward is not None:
            count, name = param.post_forward
            inner[name] = count
            sizes.pop(name, None)
    return _world({name: size for name, size in sizes.items() if size > 1}, inner)


def _add(sizes: dict[str, int], name: str, size: int) -> None:
    if name:
        sizes[name] = max(size, sizes.get(name, 0))


def _world(sizes: Mapping[str, int], inner: Mapping[str, int]) -> World:
    places, stride = dict[str, tuple[int, int]](), 1
    for name, size in sorted(sizes.items(), key=lambda item: item[0]):
        real = _real(name)
        places[name] = (stride, size) if real is None else real
        stride *= size
    for name, count in inner.items():  # neighbours among the shards
        places[name] = _real(name) or (1, count)
    ranks = _reached(places)
    number = {rank: place for place, rank in enumerate(ranks)}
    groups = {}
    for name, (step, size) in places.items():
        instances = {_instance(rank, step, size) for rank in ranks}
        if any(rank not in number for ranks_of in instances for rank in ranks_of):
            raise Unchecked(f"process group {name!r} and the others are no mesh")
        groups[name] = tuple(tuple(number[rank] for rank in ranks_of) for ranks_of in sorted(instances))
    return World(len(ranks), groups)


def _real(name: str) -> tuple[int, int] | None:
    """Distance and number of the ranks of a process group; None: there is no such group."""
    if not dist.is_initialized():
        return None
    try:
        ranks = dist.get_process_group_ranks(resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError):
        return None
    steps = {b - a for a, b in itertools.pairwise(ranks)} or {1}
    if len(steps) > 1 or min(steps) < 1:
        raise Unchecked(f"process group {name!r} has ranks {ranks}, which are no axis of a mesh")
    return min(steps), len(ranks)


def _instance(rank: int, step: int, size: int) -> tuple[int, ...]:
    first = rank - rank // step % size * step
    return tuple(first + step * place for place in range(size))


def _reached(places: Mapping[str, tuple[int, int]]) -> list[int]:
    """What rank 0 reaches by groups."""
    found, at = [0], 0
    while at < len(found):
        for step, size in places.values():
            found += [rank for rank in _instance(found[at], step, size) if rank not in found]
        if len(found) > MAX_RANKS:
            raise Unchecked(f"its groups connect more than {MAX_RANKS} ranks")
        at += 1
    return sorted(found)
