"""Small random inputs of the right sizes for every rank.

Shards are parts of one random parameter. Of other inputs there are as many kinds as `KINDS`, and further ranks bring
those of the first again: what ranks compute alike is computed once. Whole numbers are 0 and 1, for they may be indices.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.dynamo import is_wrapper
from graphshard.compat.tensors import is_known, size_hint
from graphshard.graph.ir import reductions, spec_of, unshards
from graphshard.graph.markers import ShardSpec
from graphshard.validation.markers import parted, shard_name
from graphshard.validation.unchecked import Unchecked
from graphshard.validation.world import World

KINDS = 3
# How inputs are drawn, one way after the other until all results are numbers: of either sign; above 0, for what is a
# root or a variance; and with all whole numbers 0.
Draw = Literal["signed", "positive", "zeros"]
DRAWS: tuple[Draw, ...] = ("signed", "positive", "zeros")
_SCALE, _SHARD_SCALE = 0.5, 0.2


@dataclass(frozen=True)
class Drawing:
    """Draws the inputs of one graph.

    Attributes:
        world: of ranks.
        draw: how.
        specs: of parameters, by the name of the placeholder of their shard.
        zero: names of placeholders that are 0: gradients that the loss does not have.
    """

    world: World
    draw: Draw
    specs: dict[str, ShardSpec]
    zero: Collection[str] = ()

    def of(self, name: str, like: object) -> list[Any]:
        """The values of a placeholder on every rank. `like`: its fake value."""
        if like is None or isinstance(like, (bool, int, float, str)):
            return [like] * self.world.size
        if isinstance(like, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return [self._number(name, like)] * self.world.size
        if not isinstance(like, Tensor) or is_wrapper(like) or like.layout != torch.strided:
            raise Unchecked(f"%{name} is a {type(like).__name__}, for which no value is made up")
        if like.device.type not in ("cpu", "cuda"):
            raise Unchecked(f"%{name} is on {like.device}")
        if (state := _random_state(like)) is not None:
            return [state] * self.world.size
        is_shard = name in self.specs and like.dim() == 1 and like.dtype.is_floating_point
        if is_shard and (found := self._shards(name, like)) is not None:
            return found
        kinds = [self._tensor(f"{name}/{kind}", name, like) for kind in range(min(KINDS, self.world.size))]
        return [kinds[rank % len(kinds)] for rank in range(self.world.size)]

    def _number(self, name: str, like: Any) -> Any:
        if not is_known(like):
            raise Unchecked(f"%{name} is a size that depends on data")
        return size_hint(like, 2) if isinstance(like, torch.SymInt) else like.node.hint

    def _shards(self, name: str, like: Tensor) -> list[Tensor] | None:
        spec, world = self.specs[name], self.world
        shards, found = dict[tuple[int, ...], list[Tensor]](), list[Tensor]()
        for rank in range(world.size):
            ranks = world.members(spec.group, rank) if spec.world_size > 1 else (rank,)
            copies = world.members(spec.replicate_group, rank) if spec.replicas > 1 else (rank,)
            place = ranks.index(rank)
            # Ranks of other axes, as of tensor parallelism, have parameters of their own.
            alike = tuple(
                sorted(
                    {
                        other
                        for one in copies
                        for other in (world.members(spec.group, one) if spec.world_size > 1 else (one,))
                    }
                )
            )
            if alike not in shards:
                full = self._random(f"{name}/{alike[0]}", spec.size, like.dtype, like.device) * _SHARD_SCALE
                shards[alike] = parted(full, spec)
            if shards[alike][place].shape != like.shape:
                return None
            found.append(shards[alike][place])
        return found

    def _tensor(self, seed: str, name: str, like: Tensor) -> Tensor:
        shape, strides = _numbers(name, like.shape), _numbers(name, like.stride())
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        flat = self._random(seed, (reach if all(shape) else 0,), like.dtype, like.device)
        if name in self.zero:
            flat = torch.zeros_like(flat)
        if not all(shape):
            return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
        return flat.as_strided(shape, strides)

    def _random(self, seed: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        generator, sizes = torch.Generator().manual_seed(zlib.crc32(seed.encode())), tuple(shape)
        if not (dtype.is_floating_point or dtype.is_complex):
            whole = torch.zeros(sizes) if self.draw == "zeros" else torch.randint(0, 2, sizes, generator=generator)
            return whole.to(device, dtype)
        drawn = torch.randn(sizes, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
        drawn = drawn * _SCALE
        if self.draw == "positive":
            drawn = drawn.abs() + _SCALE
        return drawn.to(device, dtype)


def _random_state(like: Tensor) -> Tensor | None:
    """A state of random numbers, where a value is like one."""
    state = torch.get_rng_state()
    if like.dtype != torch.uint8 or like.dim() != 1 or like.device.type != "cpu":
        return None
    return state if size_hint(like.shape[0], state.numel()) == state.numel() else None


def _numbers(name: str, sizes: Iterable[int | torch.SymInt]) -> list[int]:
    if not all(map(is_known, sizes)):
        raise Unchecked(f"%{name} has a size that depends on data")
    return [size_hint(size, 2) for size in sizes]


def specs_of(graph: Graph) -> dict[str, ShardSpec]:
    """The specs of the parameters of a graph, by the name of the placeholder of their shard."""
    found: dict[str, ShardSpec] = {}
    for node in (*reductions(graph), *unshards(graph)):
        if node.target is torch.ops.graphshard.unshard.default and len(node.args) > 2:
            continue  # says how its wire is gathered
        found.setdefault(shard_name(node), spec_of(node))
    return found


def value_of(node: Node) -> object:
    """The fake value of an input."""
    return node.meta.get("val", node.meta.get("example_value"))
