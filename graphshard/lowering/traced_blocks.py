"""Has the compiler's front end trace and part each of a model's equal blocks once, not as often as there are blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from graphshard import env
from graphshard.compat.autograd import quiet
from graphshard.compat.block_trace import Trace
from graphshard.compat.dynamo import copy_captured, is_static_input
from graphshard.compat.inductor import copy_graph, module_like
from graphshard.compat.partitioner import has_budget, partition
from graphshard.errors import VerifyError
from graphshard.graph.block_calls import PASS_ON, BlockCall, Body, OtherGradients, register
from graphshard.graph.equal_blocks import Block, value_of_captured
from graphshard.graph.inner_gradients import asks_for_gradients
from graphshard.graph.ir import ParamRef, PassContext, is_call, is_tangent, output_args, output_node
from graphshard.graph.saved_values import is_told, keep_copies, save_inputs_themselves, take_size
from graphshard.lowering import driver
from graphshard.passes import COLLAPSE
from graphshard.passes.collapse_blocks import CollapseEdit
from graphshard.reporting.report import Report

T = TypeVar("T")
_MOST_TRACES = 6
# Traces a part of a captured graph by itself, with arguments like these.
Tracer: TypeAlias = Callable[[GraphModule, Sequence[Tensor]], Trace]


def compile_traced_once(
    gm: GraphModule,
    trace: Tracer,
    compile_it: Callable[[Sequence[Body]], T],
    report: Report,
    title: str,
    params: Mapping[str, ParamRef],
    strict: bool = False,
) -> T:
    """Compiles a captured graph in which calls stand for equal blocks; as it is, where that cannot be.

    Args:
        gm: the graph, which is changed.
        trace: of a block, as the compiler traces the whole.
        compile_it: compiles `gm`. It keeps the bodies that it is given as long as it may expand calls of them.
        report: says how many blocks were traced once, or why not.
        title: of dumps.
        params: the sharded parameters by the name of the placeholder that holds their shard.
        strict: whether a pass that fails is an error; else blocks are traced one by one then.
    """
    if env.is_disabled(COLLAPSE.name):
        return compile_it(())
    if has_budget(gm.graph):
        report.note_once("equal blocks are traced one by one: a budget of activations is for all of a graph")
        return compile_it(())
    if asks_for_gradients(gm):
        report.note_once("equal blocks are traced one by one: forward asks for gradients (torch.autograd.grad)")
        return compile_it(())
    flat, collapsed = gm.graph, copy_captured(gm)
    edit: CollapseEdit = COLLAPSE.decide(collapsed, PassContext("captured", params))
    first = {name: (blocks[0], blocks[0].module(gm)) for name, blocks in edit.bodies}
    bodies = _Bodies(first, trace, report, title)
    left = [*edit.left, *bodies.trace_all()]
    taken = tuple((name, blocks) for name, blocks in edit.bodies if name in bodies.traced)
    if taken:
        try:
            driver.collapse(collapsed, CollapseEdit(taken), title, bodies.parts, report.note_once)
        except VerifyError as error:
            if strict or env.verify_level() < driver.RUNS:
                raise
            taken = ()
            left.append(f"pass {COLLAPSE.name} is left out: {driver.shown(error)}")
    if taken:
        gm.graph = collapsed
        try:
            compiled = _compiled(gm, bodies, compile_it)
        except _Refused as why:
            taken = ()
            left.append(str(why))
        gm.graph = flat
    for line in left:
        report.note_once(f"equal blocks are traced one by one: {line}")
    if not taken:
        return compile_it(())
    report.traces_once(sum(len(blocks) for _, blocks in taken), len(taken))
    return compiled


class _Refused(Exception):
    """Equal blocks cannot be traced once."""


class _Bodies:
    """The bodies of a graph.

    Args:
        first: a block of each, by the body's name, and that block as a graph of its own.

    Attributes:
        parts: those graphs.
        traced: what the compiler makes of them.
    """

    def __init__(
        self, first: Mapping[str, tuple[Block, GraphModule]], trace: Tracer, report: Report, title: str
    ) -> None:
        self._blocks = {name: block for name, (block, _) in first.items()}
        self.parts = {name: part for name, (_, part) in first.items()}
        self.traced: dict[str, Body] = {}
        self._trace, self._report, self._title = trace, report, title

    def trace_all(self) -> list[str]:
        """Traces each; why some cannot be."""
        left = []
        for name in self.parts:
            try:
                self._trace_one(name)
            except _Refused as why:
                left.append(str(why))
            except Exception as error:  # of the compiler's front end: where the whole fails too, it says so
                what = ": ".join(filter(None, (type(error).__name__, _first_line(error))))
                left.append(f"one of them cannot be traced alone: {what}")
        return left

    def trace_with_gradient(self, name: str, output: int, stride: Sequence[int]) -> bool:
        """Traces one again, with the gradient of one of its outputs in other strides; whether it is in these."""
        if not all(isinstance(size, int) for size in stride):
            return False
        self.parts[name] = _with_gradient(self.parts[name], output, stride)
        self._trace_one(name)
        return dict(self.traced[name].taken)[output].stride() == tuple(stride)

    def _trace_one(self, name: str) -> None:
        block = self._blocks[name]
        trace = self._trace(self.parts[name], [value_of_captured(node) for node in block.inputs])
        self.traced[name] = _body(trace, block, f"{self._title}.{name}", self._report.note_once)
        register(name, self.traced[name])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _compiled(gm: GraphModule, bodies: _Bodies, compile_it: Callable[[Sequence[Body]], T]) -> T:
    """Compiles a graph of calls. In which strides gradients come to a block is known from what is behind it only."""
    calls = gm.graph
    traces = 1
    while True:
        gm.graph = calls
        gm.graph = copy_captured(gm)  # the front end may change it
        try:
            with quiet(BlockCall.__name__):
                return compile_it([*bodies.traced.values()])
        except Exception as error:
            if (other := _cause(error)) is None:
                raise
            if traces == _MOST_TRACES or other.asked is None:
                raise _Refused(str(other)) from None
        traces += 1
        if not bodies.trace_with_gradient(*other.asked):  # torch 2.11 traces with contiguous gradients only
            raise _Refused(str(other))


def _with_gradient(part: GraphModule, output: int, stride: Sequence[int]) -> GraphModule:
    """The graph of a block whose trace has the gradient of one of its outputs in these strides."""
    part = module_like(part, copy_graph(part))
    end = output_node(part.graph)
    returned = [*output_args(part.graph)]
    if is_call(returned[output], PASS_ON):
        returned[output].args = (returned[output].args[0], stride)
    else:
        with part.graph.inserting_before(end):
            returned[output] = part.graph.call_function(PASS_ON, (returned[output], stride))
    end.args = (tuple(returned),)
    part.recompile()
    return part


def _cause(error: BaseException | None) -> OtherGradients | None:
    while error is not None and not isinstance(error, OtherGradients):
        error = error.__cause__ or error.__context__
    return error


def _body(trace: Trace, block: Block, title: str, say: Callable[[str], object]) -> Body:
    if any(_writes(node) for node in trace.gm.graph.nodes):
        raise _Refused("they write what they read")
    placeholders = trace.gm.graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if is_tangent(node)]
    results = output_args(trace.gm.graph)
    outputs = (*block.outputs, *block.passed)
    differentiable = [number for number, node in enumerate(outputs) if value_of_captured(node).requires_grad]
    found = (len(placeholders) - len(tangents), len(tangents), len(results))
    inputs = len(block.inputs)
    want = (inputs, len(differentiable), len(outputs) + inputs) if trace.is_joint else (inputs, 0, len(outputs))
    if found != want:
        raise _Refused(f"a trace has {found} inputs, gradients and results, want {want}")
    memory = [node.meta["val"].untyped_storage() for node in (*placeholders, *results[: len(outputs)])]
    if len(set(map(StorageWeakRef, memory))) < len(memory):
        raise _Refused("they return what they read, or several views of one tensor")
    own = [node.all_input_nodes[0] if is_call(node, PASS_ON) else node for node in results[: len(outputs)]]
    values = tuple(node.meta["val"] for node in own)
    taken = tuple(zip(differentiable, (node.meta["val"] for node in tangents), strict=False))
    grads = tuple(None if node is None else node.meta["val"] for node in results[len(outputs) :])
    needs_grad = tuple(getattr(value_of_captured(node), "requires_grad", False) for node in block.inputs)
    for node in trace.gm.graph.nodes:
        if is_call(node, PASS_ON):
            node.replace_all_uses_with(node.all_input_nodes[0])
            trace.gm.graph.erase_node(node)
    if not trace.is_joint:
        return Body(trace.gm, values, needs_grad=needs_grad)
    static = [place for place, node in enumerate(block.inputs) if is_static_input(node)]
    keep_copies(trace.gm.graph)
    driver.run_joint_passes(trace.gm, title, say)
    forward, backward = partition(trace.gm, (), num_fwd_outputs=len(values), static_lifetime_input_indices=static)
    save_inputs_themselves(forward, backward, len(values))
    driver.check_partition(forward, len(values))
    _without_sizes(forward, backward, len(values))
    saved = _saved(forward, backward, len(values))
    return Body(forward, values, backward, saved, taken, grads, needs_grad)


def _without_sizes(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Has `backward` take its symbolic sizes from the tensors that it reads, not from `forward`, in place."""
    results = output_args(forward.graph)
    saved = {node.name: node for node in results[outputs:] if not isinstance(node.meta["val"], Tensor)}
    tensors = [*results[:outputs], *(node for node in results[outputs:] if node.name not in saved)]
    output_node(forward.graph).args = (tuple(tensors),)
    placeholders = backward.graph.find_nodes(op="placeholder")
    found: dict[Node, Node] = {}
    with backward.graph.inserting_before(next(node for node in backward.graph.nodes if node.op != "placeholder")):
        for node in placeholders:
            if node.name in saved:
                if not is_told(saved[node.name], placeholders):
                    raise _Refused("their backward reads a size of what it does not read")
                node.replace_all_uses_with(take_size(saved[node.name], placeholders, found))
                backward.graph.erase_node(node)


def _saved(forward: GraphModule, backward: GraphModule, outputs: int) -> tuple[int, ...]:
    """Where what `backward` reads is among the inputs and results of `forward`, which returns nothing twice then."""
    inputs, results = forward.graph.find_nodes(op="placeholder"), output_args(forward.graph)
    taken = backward.graph.find_nodes(op="placeholder")
    count = len(results) - outputs
    if any(is_tangent(node) != (place >= count) for place, node in enumerate(taken)):
        raise _Refused("their backward reads what their forward does not save")
    own = [node for node in dict.fromkeys(results[outputs:]) if node not in inputs and node not in results[:outputs]]
    output_node(forward.graph).args = ((*results[:outputs], *own),)
    places = {node: place for place, node in enumerate((*inputs, *results[:outputs], *own))}
    return tuple(places[node] for node in results[outputs:])


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
