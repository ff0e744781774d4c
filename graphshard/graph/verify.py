"""Invariants of the graph, checked after every pass. Each has an id, a function here and a test with a graph that it
must reject.

G1  FX lint                                        B1  a bucket has one group, and one dtype where it reduces
G2  every value has a fake value                   S1  scheduling only permutes; the order of random operators stays
G3  recomputed fake values agree (level 2)         L1  no gathered parameter is saved for backward
G4  signature unchanged unless declared            R1  each synchronized gradient reduced exactly once
C1  one wait per result                            D1  gathers in param_dtype, reductions in reduce_dtype, gradients in
C2  nothing reads a result before its wait, or         the parameter's dtype
    writes an input before it                      M1  no marker left
C3  what is gathered and reduced per FQN unchanged S2  what a planned program allocates is within its budget

V1, that a pass keeps what a graph computes (level 2), is of `validation`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.compat.tensors import is_torch_operator
from graphshard.errors import VerifyError
from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import (
    WAIT,
    Kind,
    PassContext,
    bucket_key,
    collective,
    fake,
    gathered_source,
    is_call,
    launches,
    may_view,
    output_args,
    reductions,
    shard_placeholder,
    spec_of,
    unshards,
    val,
    waits_of,
)
from graphshard.graph.liveness import peak_bytes
from graphshard.graph.markers import UNSHARD
from graphshard.graph.printer import format_graph, format_type

# (FQN, kind of collective) -> how often each (elements, dtype)
Traffic = Mapping[tuple[str, str], Counter[tuple[int, torch.dtype]]]
Signature = tuple[tuple[str, ...], int]


def _fail(invariant: str, graph: Graph, node: Node | None, message: str) -> NoReturn:
    where = f"%{node.name}: " if node is not None else ""
    raise VerifyError(invariant, f"{where}{message}\n{format_graph(graph, node) if node is not None else ''}")


# By node: its target and arguments, its value and theirs.
Recomputed = dict[Node, tuple[Any, Any, Any, list[Any]]]


def check_lint(graph: Graph) -> None:
    """G1."""
    try:
        graph.lint()
    except Exception as error:
        raise VerifyError("G1", str(error)) from error


def check_values(graph: Graph, recomputed: Recomputed | None = None) -> None:
    """G2, and G3 where there is `recomputed`: shape, dtype and strides of every operator's result, computed again from
    its arguments.

    Args:
        graph: to check.
        recomputed: what was found right after earlier passes, and is not computed again; gets what is found now.
    """
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta and not _has_no_value(node):
            _fail("G2", graph, node, "has no meta['val']")
        if recomputed is not None and node.op == "call_function":
            sources = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
            target, args, kwargs, known = recomputed.get(node, (None, (), {}, []))
            if (
                target is not node.target
                or (args, kwargs) != (node.args, node.kwargs)
                or any(now is not then for now, then in zip(sources, known, strict=True))
            ):
                _check_value(graph, node)
                recomputed[node] = (node.target, node.args, node.kwargs, sources)


def _has_no_value(node: Node) -> bool:
    """Whether `node` returns nothing, or calls an operator on operators: torch's partitioner adds such nodes without a
    fake value.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not is_torch_operator(node.target) or not node.target._schema.returns  # noqa: SLF001


def _check_value(graph: Graph, node: Node) -> None:
    have = node.meta.get("val")
    tensors = [x for x in (have if isinstance(have, (tuple, list)) else [have]) if isinstance(x, Tensor)]
    if not tensors or not hasattr(tensors[0], "fake_mode") or not is_torch_operator(node.target):
        return
    if not (node.target.namespace in ("graphshard", "_c10d_functional") or "bucket_of" in node.meta):
        return  # the model's own operators are AOTAutograd's business, and may draw new symbols
    if "partial" in node.meta:
        return  # a flag has changed its dtype, which D1 checks
    with tensors[0].fake_mode, torch.no_grad():
        want = node.target(*fake(node.args), **fake(node.kwargs))
    wanted = [x for x in (want if isinstance(want, (tuple, list)) else [want]) if isinstance(x, Tensor)]
    for old, new in zip(tensors, wanted, strict=True):
        if (old.dtype, tuple(old.shape), old.stride()) != (new.dtype, tuple(new.shape), new.stride()):
            _fail(
                "G3",
                graph,
                node,
                f"meta['val'] got {format_type(old)}, want {format_type(new)}, strides {old.stride()}, {new.stride()}",
            )


def signature(graph: Graph) -> Signature:
    """Names of the placeholders and the number of results, for `check_signature`."""
    return tuple(node.name for node in graph.nodes if node.op == "placeholder"), len(output_args(graph))


def check_signature(graph: Graph, before: Signature) -> None:
    """G4."""
    if (now := signature(graph)) != before:
        raise VerifyError("G4", f"signature changed: got {now}, want {before}")


def check_waits(graph: Graph) -> None:
    """C1."""
    for launch in launches(graph):
        if collective(launch) is not None:
            got, want = len(waits_of(launch)), _num_results(launch)
            if got != want:
                _fail("C1", graph, launch, f"got {got} waits, want {want}")


def check_hazards(graph: Graph) -> None:
    """C2."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for launch in launches(graph):
        if collective(launch) is None:
            continue
        results = [launch] if isinstance(val(launch), Tensor) else list(launch.users)
        readers = [user for result in results for user in result.users if not is_call(user, WAIT)]
        if readers:
            _fail("C2", graph, readers[0], f"reads the result of %{launch.name} before its wait")
        end = max((position[wait] for wait in waits_of(launch)), default=position[launch])
        for source in launch.all_input_nodes:
            writers = [user for alias in _aliases(source) for user in alias.users if _writes(user, alias)]
            for writer in writers:
                if position[launch] < position[writer] < end:
                    _fail("C2", graph, writer, f"writes %{source}, which %{launch.name} still reads")


def _num_results(launch: Node) -> int:
    return 1 if isinstance(val(launch), Tensor) else len(val(launch))


def _aliases(node: Node) -> list[Node]:
    """`node`, what it is a view of, and every view of these."""
    base = node
    while may_view(base):
        base = base.all_input_nodes[0]
    found, i = [base], 0
    while i < len(found):
        found += [user for user in found[i].users if may_view(user) and user.args[0] is found[i]]
        i += 1
    return found


def _writes(user: Node, alias: Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    given = {**dict(zip((spec.name for spec in schema.arguments), user.args, strict=False)), **user.kwargs}
    written = [
        given.get(spec.name) for spec in schema.arguments if spec.alias_info is not None and spec.alias_info.is_write
    ]
    return any(item is alias for value in written for item in (value if isinstance(value, (list, tuple)) else [value]))


def traffic(graph: Graph, ctx: PassContext) -> Traffic:
    """What markers and launches gather and reduce, per FQN; the two count alike."""
    found: dict[tuple[str, str], Counter[tuple[int, torch.dtype]]] = {}
    for node in unshards(graph):
        param, spec = ctx.params[shard_placeholder(node).name], spec_of(node)
        if spec.world_size > 1:
            found.setdefault((param.fqn, "all_gather"), Counter())[val(gathered_source(node)).numel(), spec.dtype] += 1
    for node in reductions(graph):
        param, spec = ctx.params[shard_placeholder(node).name], spec_of(node)
        for kind in reduction_kinds(node, ctx):
            found.setdefault((param.fqn, kind), Counter())[param.shard_numel, spec.reduce_dtype] += 1
    for launch in launches(graph):
        if (carried := collective(launch)) is not None:
            for member in carried.members:
                found.setdefault((member.fqn, carried.kind), Counter())[member.shard_numel, member.dtype] += 1
    return found


def reduction_kinds(node: Node, ctx: PassContext) -> list[Kind]:
    """The collectives that a reduction becomes."""
    spec = spec_of(node)
    kinds: list[Kind] = ["reduce_scatter"] if spec.world_size > 1 else []
    if spec.replicas > 1 and ctx.flags.settings(ctx.params[shard_placeholder(node).name].unit).all_reduce:
        kinds.append("all_reduce")
    return kinds


def check_traffic(graph: Graph, ctx: PassContext, before: Traffic) -> None:
    """C3, and with it D1 for what is on the wire: the markers say the dtypes."""
    now = traffic(graph, ctx)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            fqn, kind = key
            raise VerifyError("C3", f"{fqn}: {kind} got {now.get(key)}, want {before.get(key)}")


def check_buckets(graph: Graph, ctx: PassContext) -> None:
    """B1."""
    seen: dict[str, tuple[Node, object]] = {}
    for node in [*unshards(graph), *reductions(graph)]:
        if "bucket" in node.meta:
            bucket, key = node.meta["bucket"][0], bucket_key(node, ctx)
            other, other_key = seen.setdefault(bucket, (node, key))
            if key != other_key:
                _fail("B1", graph, node, f"bucket {bucket!r} mixes {key} with {other_key} of %{other.name}")


def check_budget(graph: Graph, ctx: PassContext, budget_bytes: int) -> None:
    """S2: what the lowered program allocates, arguments included, is within the budget that it was planned for."""
    if (peak := peak_bytes(graph, ctx)) > budget_bytes:
        raise VerifyError("S2", f"the {ctx.direction} program allocates {peak} bytes, want at most {budget_bytes}")


def check_dtypes(graph: Graph) -> None:
    """D1: a launch moves the dtype that it says, and a gradient comes out in its parameter's dtype."""
    for launch in launches(graph):
        moved = [val(launch)] if isinstance(val(launch), Tensor) else val(launch)
        for result in moved:
            if (carried := collective(launch)) is not None and result.dtype != carried.dtype:
                _fail("D1", graph, launch, f"moves {result.dtype}, want {carried.dtype}")
    for node in reductions(graph):
        want = spec_of(node).reduce_dtype if "partial" in node.meta else val(shard_placeholder(node)).dtype
        if val(node).dtype != want:
            _fail("D1", graph, node, f"gradient is {val(node).dtype}, want {want}")


def random_operators(graph: Graph) -> list[str]:
    """Names of the nodes that draw random numbers, in order."""
    tag = torch.Tag.nondeterministic_seeded
    return [node.name for node in graph.nodes if tag in getattr(node.target, "tags", ())]


def check_permutation(graph: Graph, before: list[str], random_before: list[str]) -> None:
    """S1. `before`: names of all nodes, `random_before`: those that draw random numbers, both before the pass."""
    now = {node.name for node in graph.nodes}
    if changed := sorted(now.symmetric_difference(before)):
        raise VerifyError("S1", f"a pass that only permutes has added or removed {', '.join(changed)}")
    if random_operators(graph) != random_before:
        raise VerifyError("S1", f"random operators moved: got {random_operators(graph)}, want {random_before}")


def check_reshard(forward: Graph, num_results: int) -> None:
    """L1, on the forward graph of a region with markers; its first `num_results` results are the user's, the rest is
    saved.
    """
    for saved in output_args(forward)[num_results:]:
        base = saved
        while isinstance(base, Node) and may_view(base):
            base = base.all_input_nodes[0]
        if is_call(base, UNSHARD) and spec_of(base).world_size > 1:
            _fail("L1", forward, base, "is saved for backward, which is to gather it again or to get it as an argument")


def check_reductions(graph: Graph, ctx: PassContext, wanted: frozenset[str]) -> None:
    """R1. `wanted`: FQNs of the parameters whose gradients this program synchronizes."""
    times: Counter[str] = Counter()
    for launch in launches(graph):
        carried = collective(launch)
        # The all-reduce behind a reduce-scatter belongs to the same reduction.
        if carried is not None and carried.kind != "all_gather" and not carried.bucket.endswith(ALL_REDUCE_BUCKET):
            times.update(member.fqn for member in carried.members)
    for node in reductions(graph):
        times[ctx.params[shard_placeholder(node).name].fqn] += 1
    for fqn in sorted(wanted | times.keys()):
        if times[fqn] != (fqn in wanted):
            raise VerifyError("R1", f"{fqn}: its gradient is reduced {times[fqn]} times, want {int(fqn in wanted)}")


def check_lowered(graph: Graph) -> None:
    """M1."""
    for node in [*unshards(graph), *reductions(graph)]:
        _fail("M1", graph, node, "is still there after lowering")
