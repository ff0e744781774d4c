"""Replaces a bucket's copy-in and copy-out by one operator each, with its casts, padding and scaling.

Needs: a graph with launches and waits, and `PassContext.fuses`. Leaves: no operator of torch between tensors and the
flat buffer of a bucket of several; of one alone only where two copies or more become one. What the kernel cannot do
stays as it is: casts of dtypes that it does not know, members of several dtypes.

    %c0 = convert(%s0);  %c1 = convert(%s1);  %in = cat([%c0, %c1])      ->  %in = gather_copy_in([%s0, %s1])
    %r = split(view(%w, [W, -1]));  %a = reshape(clone(%r0)), ...        ->  %a, %b = gather_copy_out(%w)
    %g = cat([view(pad(convert(%g0)), [W, -1]), ...], 1);  %in = %g / W  ->  %in = reduce_copy_in([%g0, ...])

Source: FSDP2's `all_gather_copy_in`, `chunk_cat` and `split_with_sizes_copy`, with the casts in them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphshard.graph.builder import Builder
from graphshard.graph.ir import Collective, PassContext, aten, collective, is_call, launches, may_view, val
from graphshard.graph.rewriting import Replacements
from graphshard.kernels import can_copy
from graphshard.kernels import ops as kernels

_CAST = torch.ops.prims.convert_element_type.default
_SCALES: dict[object, str] = {aten.mul.Tensor: "multiplier", aten.div.Tensor: "divisor"}
# What makes rows of shards of a gradient.
_ROW = (_CAST, aten.reshape.default, aten.clone.default, aten.permute.default, aten.constant_pad_nd.default)
# One copy of a bucket of one is a copy still.
_WORTH = 2


@dataclass(frozen=True)
class Fusion:
    """Some nodes to replace by one operator.

    Attributes:
        kind: ``"gather_copy_in"``, ``"gather_copy_out"`` or ``"reduce_copy_in"``.
        bucket: the name of the bucket.
        sources: the nodes that are read.
        results: the nodes that are replaced: the flat buffer, or the whole parameters.
        text: dtypes of the shards, or members to copy out.
        dims: of the gradients, those that are sharded.
        world_size: number of shards.
        dtype: of the flat buffer of gradients.
        multiplier, divisor: of it.
    """

    kind: str
    bucket: str
    sources: tuple[str, ...]
    results: tuple[str, ...]
    text: str = ""
    dims: tuple[int, ...] = ()
    world_size: int = 1
    dtype: torch.dtype = torch.float32
    multiplier: float | None = None
    divisor: float | None = None


@dataclass(frozen=True)
class FuseEdit:
    """Everything to fuse."""

    fusions: tuple[Fusion, ...]

    def __bool__(self) -> bool:
        return bool(self.fusions)


def decide(graph: Graph, ctx: PassContext) -> FuseEdit:
    """Finds the copies of every bucket."""
    if not ctx.fuses:
        return FuseEdit(())
    roles: dict[tuple[str, str], set[Node]] = defaultdict(set)
    for node in graph.nodes:
        if "bucket_of" in node.meta:
            roles[node.meta["bucket_of"], node.meta["role"]].add(node)
    dims = {ref.fqn: ref.dim for ref in ctx.params.values()}
    found: list[Fusion] = []
    for launch in launches(graph):
        if (about := collective(launch)) is None:
            continue
        copies_in, copies_out = roles[about.bucket, "copy_in"], roles[about.bucket, "copy_out"]
        own_dims = tuple(dims[member.fqn] for member in about.members)
        if isinstance(launch.args[0], list):  # coalesced: no gather is copied, and each gradient by itself
            if about.kind == "reduce_scatter":
                for grad, dim in zip(launch.args[0], own_dims, strict=True):
                    found += _reduce_copy_in(grad, about, copies_in, (dim,))
        elif about.kind == "all_gather":
            found += _gather_copy_in(launch, about, copies_in)
            found += _gather_copy_out(launch, about, copies_out, own_dims)
        else:
            found += _reduce_copy_in(_argument(launch), about, copies_in, own_dims)
    return FuseEdit(tuple(found))


def _gather_copy_in(launch: Node, about: Collective, inside: set[Node]) -> Iterator[Fusion]:
    flat = _argument(launch)
    if not (is_call(flat, aten.cat.default) and flat in inside):
        return
    sources, dtypes = list[Node](), []
    for part in _members(flat):
        if is_call(part, aten.view.dtype) and part in inside:  # as bytes
            part = _argument(part)
        dtypes.append(str(val(part).dtype).removeprefix("torch."))
        sources.append(_argument(part) if is_call(part, _CAST) and part in inside else part)
    if not all(can_copy(val(source).dtype, about.dtype) for source in sources):
        return
    yield Fusion("gather_copy_in", about.bucket, _names(sources), (flat.name,), ",".join(dtypes))


def _gather_copy_out(launch: Node, about: Collective, inside: set[Node], dims: Sequence[int]) -> Iterator[Fusion]:
    split = next((node for node in inside if is_call(node, aten.split_with_sizes.default)), None)
    if split is None:
        return
    parts = sorted(split.users, key=lambda node: node.args[1])  # type: ignore[arg-type, return-value]
    wholes = [whole for part in parts if (whole := _last(part, inside)) is not None]
    if len(wholes) < len(parts) or not all(val(whole).is_contiguous() for whole in wholes):
        return
    if any(val(whole).dtype != about.dtype for whole in wholes):  # as bytes, which may begin anywhere
        return
    (wait,) = launch.users
    text = ",".join(
        str(kernels.Whole(tuple(val(whole).shape), dim, val(whole).dtype))
        for whole, dim in zip(wholes, dims, strict=True)
    )
    yield Fusion("gather_copy_out", about.bucket, (wait.name,), _names(wholes), text, world_size=about.world_size)


def _reduce_copy_in(flat: Node, about: Collective, inside: set[Node], dims: Sequence[int]) -> Iterator[Fusion]:
    scales: dict[str, float] = {}
    node = flat
    while node in inside and (node.target in _SCALES or is_call(node, aten.reshape.default)):
        if (scale := _SCALES.get(node.target)) is not None:
            scales[scale] = float(node.args[1])  # type: ignore[arg-type]
        node = _argument(node)
    joined = node in inside and is_call(node, aten.cat.default)
    chains = [list(_chain(row, inside)) for row in (_members(node) if joined else [node])]
    if any(link in inside for *_, link in chains):  # of something else, as partial gradients that are added
        return
    if not joined and len(scales) + sum(not may_view(link) for link in chains[0][:-1]) < _WORTH:
        return
    sources = [source for *_, source in chains]
    if not all(can_copy(val(source).dtype, about.dtype, bool(scales)) for source in sources):
        return
    yield Fusion(
        "reduce_copy_in",
        about.bucket,
        _names(sources),
        (flat.name,),
        dims=tuple(dims),
        world_size=1 if about.kind == "all_reduce" else about.world_size,
        dtype=about.dtype,
        multiplier=scales.get("multiplier"),
        divisor=scales.get("divisor"),
    )


def _members(cat: Node) -> Sequence[Node]:
    members: Sequence[Node] = cat.args[0]  # type: ignore[assignment]
    return members


def _argument(node: Node) -> Node:
    argument = node.args[0]
    assert isinstance(argument, Node)
    return argument


def _chain(node: Node, inside: set[Node]) -> Iterator[Node]:
    """A row of shards, back to the gradient that it is made of."""
    yield node
    while node in inside and node.target in _ROW:
        node = _argument(node)
        yield node


def _last(node: Node, inside: set[Node]) -> Node | None:
    """The tensor that a chain of copies ends with; None: it is no chain."""
    while True:
        behind = [user for user in node.users if user in inside]
        if not behind:
            return node
        if len(node.users) > 1:
            return None
        node = behind[0]


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def apply(graph: Graph, edit: FuseEdit) -> None:
    """Puts the operators in, where the flat buffer was filled or the first parameter was read; erases the rest."""
    by_name, replacements = {node.name: node for node in graph.nodes}, Replacements(graph)
    for fusion in edit.fusions:
        sources = [by_name[name] for name in fusion.sources]
        results = [by_name[name] for name in fusion.results]
        anchor = results[0] if fusion.kind != "gather_copy_out" else sources[0].next
        build = Builder(graph, anchor, **_meta(results[0]))
        for result, new in zip(results, _emitted(build, fusion, sources), strict=True):
            replacements.put_alike(result, new)
    replacements.finish()
    for fusion in edit.fusions:
        for name in fusion.results:
            _erase(graph, by_name[name], fusion.bucket)


def _emitted(build: Builder, fusion: Fusion, sources: Sequence[Node]) -> Sequence[Node]:
    if fusion.kind == "gather_copy_in":
        return [build.call(kernels.GATHER_COPY_IN, list(sources), fusion.text)]
    if fusion.kind == "gather_copy_out":
        whole = build.call(kernels.GATHER_COPY_OUT, sources[0], fusion.text, fusion.world_size)
        return [build.call(operator.getitem, whole, i) for i in range(len(fusion.results))]
    more = (list(fusion.dims), fusion.world_size, fusion.dtype, fusion.multiplier, fusion.divisor)
    return [build.call(kernels.REDUCE_COPY_IN, list(sources), *more)]


def _meta(node: Node) -> Mapping[str, object]:
    return {name: node.meta[name] for name in ("bucket_of", "role", "steps") if name in node.meta}


def _erase(graph: Graph, node: Node, bucket: str) -> None:
    """Erases a node, and what of its bucket nothing else reads."""
    if not node.users and node.meta.get("role") in ("copy_in", "copy_out") and node.meta.get("bucket_of") == bucket:
        sources = list(node.all_input_nodes)
        graph.erase_node(node)
        for source in sources:
            _erase(graph, source, bucket)
