"""Small marked graphs for tests of passes: built by hand, node by node with fake values, or traced from a function.

No process group is needed: markers carry the name of a group and the number of its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from graphshard.compat.inductor import compile_region_aot, copy_graph
from graphshard.compat.partitioner import partition
from graphshard.graph.ir import Direction, Flags, ParamRef, PassContext, aten, output_args
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD, ShardSpec, padded_shape
from graphshard.passes import PROGRAM
from graphshard.passes.apply_residency import REJOINED

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def copied(gm: GraphModule) -> GraphModule:
    """`gm` with a graph of its own."""
    return GraphModule(gm, copy_graph(gm))


@dataclass(frozen=True)
class Weight:
    """A sharded parameter of a test graph; its unit is what stands before the last dot of its FQN.

    `param_dtype` is `dtype` unless it is given, `reduce_dtype` is `param_dtype`.
    """

    fqn: str
    size: tuple[int, ...]
    index: int = 0
    world_size: int = 2
    dtype: torch.dtype = F32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    dim: int = 0
    group: str = "0"
    replicas: int = 1
    replicate_group: str = "copies"
    post_forward: tuple[int, str] | None = None
    device: str = ""

    @property
    def spec(self) -> ShardSpec:
        param_dtype = self.param_dtype or self.dtype
        reduce_dtype = self.reduce_dtype or param_dtype
        copies = (self.replicas, self.replicate_group) if self.replicas > 1 else (1, "")
        return ShardSpec(
            self.size, param_dtype, reduce_dtype, self.dim, self.world_size, self.group, *copies, self.device
        )

    @property
    def shard_numel(self) -> int:
        return math.prod(padded_shape(self.size, self.world_size, self.dim)) // self.world_size

    @property
    def ref(self) -> ParamRef:
        unit = self.fqn.rpartition(".")[0]
        return ParamRef(
            self.fqn,
            unit,
            self.index,
            self.size,
            self.shard_numel,
            self.dtype,
            dim=self.dim,
            post_forward=self.post_forward,
        )

    @property
    def shard_name(self) -> str:
        """Name of the placeholder of its shard."""
        return f"{self.fqn.replace('.', '_')}_shard"

    def shards(self, full: Tensor, count: int | None = None) -> list[Tensor]:
        """The flat padded shard of each of `count` ranks (None: of the weight's own)."""
        count = count or self.world_size
        padded = full.new_zeros(padded_shape(self.size, count, self.dim))
        padded.narrow(self.dim, 0, self.size[self.dim]).copy_(full)
        return [part.flatten() for part in padded.chunk(count, self.dim)]


@dataclass
class Marked:
    """A graph with markers and what passes may know of it."""

    gm: GraphModule
    ctx: PassContext

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def flagged(self, **flags: Any) -> Marked:
        """A copy with run-time flags."""
        params = dict(self.ctx.params)
        for name in flags.get("rejoined", ()):
            params[REJOINED + name] = _post_forward_ref(params[name])
        return Marked(copied(self.gm), replace(self.ctx, params=params, flags=Flags(**flags)))

    def coalescing(self) -> Marked:
        """The same graph, whose buckets of several have no flat buffer."""
        return Marked(self.gm, replace(self.ctx, coalesces=lambda kind, members: len(members) > 1))

    def node(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def calls(self, target: Any) -> list[Node]:
        return list(self.graph.find_nodes(op="call_function", target=target))


def _post_forward_ref(param: ParamRef) -> ParamRef:
    assert param.post_forward is not None
    count, _ = param.post_forward
    return replace(param, shard_numel=math.prod(padded_shape(param.size, count, param.dim)) // count)


@dataclass
class GraphBuilder:
    """Builds a graph node by node, and computes the fake value of each."""

    direction: Direction = "forward"
    graph: Graph = field(default_factory=Graph)
    params: dict[str, ParamRef] = field(default_factory=dict)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)

    def input(self, name: str, size: Sequence[int], dtype: torch.dtype = F32) -> Node:
        """A placeholder, after those that are there."""
        before = [node for node in self.graph.nodes if node.op == "placeholder"]
        root = before[-1] if before else None
        with self.graph.inserting_after(root):
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(size, dtype=dtype)
        return node

    def shard(self, weight: Weight) -> Node:
        """The placeholder of a parameter's shard, made when it is first asked for."""
        if weight.shard_name not in self.params:
            self.params[weight.shard_name] = weight.ref
            return self.input(weight.shard_name, [weight.shard_numel], weight.dtype)
        return next(node for node in self.graph.nodes if node.name == weight.shard_name)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def unshard(self, weight: Weight) -> Node:
        return self.call(UNSHARD, self.shard(weight), str(weight.spec))

    def reduce(self, grad: Node, weight: Weight) -> Node:
        return self.call(REDUCE_GRAD, grad, self.shard(weight), str(weight.spec))

    def finish(self, *results: Node | int | None) -> Marked:
        self.graph.output(results)
        return Marked(GraphModule(nn.Module(), self.graph), PassContext(self.direction, self.params))


BATCH, WIDTH, CLASSES = 4, 6, 5


def toy_weights(blocks: int = 2, **changes: Any) -> list[Weight]:
    """Blocks of a weight and a bias, then a head of the root's unit."""
    weights = []
    for i in range(blocks):
        weights.append(Weight(f"blocks.{i}.weight", (WIDTH, WIDTH), 0, **changes))
        weights.append(Weight(f"blocks.{i}.bias", (WIDTH,), 1, **changes))
    return [*weights, Weight("head", (CLASSES, WIDTH), 0, **changes)]


def toy_forward(weights: Sequence[Weight], direction: Direction = "forward") -> Marked:
    """Computes `head @ relu(weight @ x + bias) ...`; returns it, then what backward needs: inputs of the blocks and
    of the head.
    """
    build = GraphBuilder(direction)
    dtype = weights[0].spec.dtype
    hidden = build.input("x", [BATCH, WIDTH], dtype)
    for weight in weights:
        build.shard(weight)
    *layers, head = weights
    saved = [hidden]
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        transposed = build.call(aten.t.default, build.unshard(weight))
        hidden = build.call(aten.relu.default, build.call(aten.addmm.default, build.unshard(bias), hidden, transposed))
        saved.append(hidden)
    scores = build.call(aten.mm.default, hidden, build.call(aten.t.default, build.unshard(head)))
    return build.finish(scores, *(saved if direction == "forward" else []))


def toy_backward(weights: Sequence[Weight]) -> Marked:
    """The gradients of `toy_forward`: takes the shards, what was saved and the gradient of the scores; returns one
    reduced gradient per parameter, in the order of `weights`.
    """
    build = GraphBuilder("backward")
    *layers, head = weights
    dtype = head.spec.dtype
    for weight in weights:
        build.shard(weight)
    pairs = list(zip(layers[::2], layers[1::2], strict=True))
    saved = [build.input(f"hidden_{i}", [BATCH, WIDTH], dtype) for i in range(len(pairs) + 1)]
    tangent = build.input("tangents_1", [BATCH, CLASSES], dtype)
    grads = {head: build.reduce(_weight_grad(build, tangent, saved[-1]), head)}
    grad = build.call(aten.mm.default, tangent, build.unshard(head))
    for i, (weight, bias) in reversed(list(enumerate(pairs))):
        full = build.unshard(weight) if i else None  # the input needs no gradient
        grad = build.call(aten.threshold_backward.default, grad, saved[i + 1], 0)
        grads[bias] = build.reduce(build.call(aten.sum.dim_IntList, grad, [0]), bias)
        grads[weight] = build.reduce(_weight_grad(build, grad, saved[i]), weight)
        if full is not None:
            grad = build.call(aten.mm.default, grad, full)
    return build.finish(*(grads[weight] for weight in weights))


def _weight_grad(build: GraphBuilder, grad: Node, hidden: Node) -> Node:
    return build.call(aten.mm.default, build.call(aten.t.default, grad), hidden)


def two_gathers(*weights: Weight) -> Marked:
    """Gathers each weight, in this order, and returns a copy of each."""
    build = GraphBuilder()
    full = [build.unshard(weight) for weight in weights]
    return build.finish(*(build.call(aten.clone.default, node) for node in full))


def two_reductions(*weights: Weight, grad_dtype: torch.dtype | None = None) -> Marked:
    """Reduces twice each tangent for its weight: `tangents_1` is the gradient of the first."""
    build = GraphBuilder("backward")
    for weight in weights:
        build.shard(weight)
    dtypes = [grad_dtype or weight.spec.dtype for weight in weights]
    tangents = [
        build.input(f"tangents_{i}", weight.size, dtype)
        for i, (weight, dtype) in enumerate(zip(weights, dtypes, strict=True), start=1)
    ]
    doubled = [build.call(aten.mul.Tensor, tangent, 2) for tangent in tangents]
    return build.finish(*(build.reduce(grad, weight) for grad, weight in zip(doubled, weights, strict=True)))


def lowered_until(marked: Marked, last: str | None = None) -> Marked:
    """Runs the passes of `PROGRAM` on a copy, without the driver, until after the pass `last` (None: all)."""
    lowered = Marked(copied(marked.gm), marked.ctx)
    for step in PROGRAM:
        if edit := step.decide(lowered.graph, lowered.ctx):
            step.apply(lowered.graph, edit)
        if step.name == last:
            break
    lowered.graph.lint()
    lowered.gm.recompile()
    return lowered


@dataclass
class Traced:
    """What AOTAutograd makes of a function of (shards, inputs). The joint graph is as it was before any pass."""

    joint: GraphModule
    forward: Marked
    backward: Marked
    num_results: int


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any], weights: Sequence[Weight]) -> None:
        super().__init__()
        self.function = function
        self.weights = weights

    def forward(self, *args: Tensor) -> Any:
        leaves, inputs = args[: len(self.weights)], args[len(self.weights) :]
        return (self.function(lambda i: UNSHARD(leaves[i], str(self.weights[i].spec)), *inputs),)


def trace(
    function: Callable[..., Any],
    weights: Sequence[Weight],
    inputs: Sequence[Tensor],
    joint_passes: Callable[[GraphModule], object],
) -> Traced:
    """Traces `function(read, *inputs)`; each `read(i)` gathers the parameter of `weights[i]`.

    Args:
        function: returns one tensor.
        weights: one leaf is made for each.
        inputs: example tensors.
        joint_passes: is run on the joint graph before it is partitioned.
    """
    graphs: dict[str, GraphModule] = {}
    num_results = []
    params = {f"primals_{i}": weight.ref for i, weight in enumerate(weights, start=1)}

    def partitioner(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        graphs["joint"] = copied(joint)
        num_results.append(kwargs["num_fwd_outputs"])
        joint_passes(joint)
        graphs["forward"], graphs["backward"] = partition(joint, joint_inputs, **kwargs)
        return copied(graphs["forward"]), copied(graphs["backward"])

    def compiler(gm: GraphModule, _: Any, *, direction: str) -> Callable[..., Any]:
        return gm.forward

    leaves = [torch.zeros(weight.shard_numel, dtype=weight.dtype, requires_grad=True) for weight in weights]
    compile_region_aot(_Function(function, weights), [*leaves, *inputs], compiler, partitioner)  # type: ignore[arg-type]
    forward, backward = (Marked(graphs[name], PassContext(name, params)) for name in ("forward", "backward"))  # type: ignore[arg-type]
    return Traced(graphs["joint"], forward, backward, num_results[0])


def result_nodes(graph: Graph) -> list[Node]:
    """Results of a graph that are nodes."""
    return [result for result in output_args(graph) if isinstance(result, Node)]
