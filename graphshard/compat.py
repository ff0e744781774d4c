"""Everything private of Dynamo, AOTAutograd and Inductor that graphshard uses (torch 2.11 to 2.15), each behind a
plain function.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.virtualized import V
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

C = TypeVar("C", bound=Callable[..., Any])

SUPPORTED = ((2, 11), (2, 15))

# Inductor's own reordering would undo every prefetch: in forward all-gathers move to their use, in inference all of
# them move to the top, in backward reduce-scatters move to the end. With both off it keeps the order of the FX graph.
INDUCTOR_PATCHES: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
}
if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # since torch 2.15, on
    INDUCTOR_PATCHES["aten_distributed_optimizations.enable_simple_overlap"] = False

# Larger than any id that activation checkpointing gives to its regions.
_RESHARD_REGION_ID = 10**6


def check_torch_version() -> None:
    """Raises:
    RuntimeError: if the installed torch is not one that graphshard supports.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not SUPPORTED[0] <= (major, minor) <= SUPPORTED[1]:
        low, high = (".".join(map(str, version)) for version in SUPPORTED)
        raise RuntimeError(f"graphshard: got torch {torch.__version__}, want {low} to {high}; install one of these")


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Lets `wait_tensor(tensor)` wait for what makes it."""
    torch._C._distributed_c10d._register_work(tensor, work)


def takes_several_tensors(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether what runs the collectives of `group` on a device has one that takes several tensors at once."""
    if type(group) is dist.ProcessGroup:
        return bool(group._get_backend(torch.device(device_type)).supports_coalescing)
    return bool(getattr(group, "supports_coalescing", False))  # of someone's own


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode (CommDebugMode, a FLOP counter) is on: Dynamo would skip the frame for good."""
    return torch._C._len_torch_dispatch_stack() > 0


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Says of `run` that it takes its arguments as one list, which it may empty."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def boxed_graph(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Runs `gm` as it is; empties the list of its arguments, so that each is freed after its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    run: Callable[[list[Any]], Any] = gm.forward  # without the five calls of a module around it
    return run


def uncaptured(function: C) -> C:
    """Keeps Dynamo out of `function` and of all that it calls, except for what is compiled on purpose."""
    disabled: C = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the running backward pass ends. Must be called from within a backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Number of the backward pass that runs in this thread, -1 for none."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Whether the running backward pass will run, or has run, a node of autograd's graph."""
    return torch._C._will_engine_execute_node(node)


def accumulates_into(leaf: Tensor) -> bool:
    """Whether the running backward pass accumulates a gradient into `leaf`: `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch refuses the question for a leaf while it runs `torch.autograd.grad`
        return False


def called_to_reduce_grads() -> bool:
    """Whether the caller's caller is a pipeline stage that reduces the gradients of its microbatches."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    method = getattr(getattr(stage, "_PipelineStageBase", None), "perform_reduce_grad", None)
    return method is not None and sys._getframe(2).f_code is method.__code__


def keeps_graph() -> bool:
    """Whether the running backward pass was asked to keep its graph (retain_graph or create_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def inline_only(function: C) -> C:
    """Lets Dynamo inline `function` in a trace, but never capture its frame by itself: each call outside a trace is
    plain Python.
    """
    skip_code(function.__code__)
    return function


def fake_tensors() -> Any:
    """A mode of its own in which tensors have no data."""
    return FakeTensorMode()


def moved_tensors(values: Any, device: torch.device) -> Any:
    """`values` with every tensor, in any containers, on `device`."""

    def moved(value: Tensor) -> Tensor:
        return value if value.device.type == device.type else value.to(device, non_blocking=True)

    return tree_map_only(Tensor, moved, values)


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place, through itself or a view of it."""
    return tensor._version


def keep_static(tensor: Tensor) -> None:
    """Tells Dynamo never to make a dim of `tensor` symbolic."""
    torch._dynamo.mark_static(tensor)


def ends_in_graph_break(gm: GraphModule) -> bool:
    """Whether Dynamo ended a captured graph before its frame ended."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def sets_grad_mode(node: Node) -> bool | None:
    """What a node of a captured graph switches gradients to; None if it does not."""
    if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
        return bool(node.args[0])
    return None


def tag_reshard(node: Node) -> None:
    """Makes the partitioner gather again in backward. Untagged, the gathered value would be saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _RESHARD_REGION_ID


def tag_saved(node: Node) -> None:
    """Forbids the partitioner to compute a node again; what backward needs of it is saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph by AOTAutograd's min-cut."""
    kwargs.pop("compiler", None)
    _return_own_meshes(joint, kwargs["num_fwd_outputs"])
    graphs: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(
        joint, joint_inputs, compiler="inductor", **kwargs
    )
    _erase_repeated_waits(*graphs)
    return graphs


def _erase_repeated_waits(*graphs: GraphModule) -> None:
    """Erases collectives of the model that are in both graphs where nothing reads their result.

    Waits have side effects, so that the partitioner leaves what only one graph needs in the other too.
    """
    names = [{node.name for node in gm.graph.nodes} for gm in graphs]
    both = names[0].intersection(*names[1:])
    for gm in graphs:
        for node in reversed(gm.graph.nodes):
            repeated = node.name in both and getattr(node.target, "namespace", "") == "_c10d_functional"
            if node.op == "call_function" and not node.users and (repeated or not node.is_impure()):
                gm.graph.erase_node(node)
        gm.recompile()


def _return_own_meshes(joint: GraphModule, num_fwd_outputs: int) -> None:
    """Returns the graph's own mesh with an output that is a DTensor.

    DTensor's cache of sharding rules may yield an equal mesh of an earlier computation, which AOTAutograd knows only
    as part of the output's gradient: forward cannot return that (torch 2.13).
    """
    output = next(iter(joint.graph.find_nodes(op="output")))
    results = list(output.args[0])

    def mesh(node: Any) -> Any:
        value = node.meta.get("val") if isinstance(node, Node) and node.op == "placeholder" else None
        return getattr(value, "real_obj", None)

    for i, result in enumerate(results[:num_fwd_outputs]):
        if (found := mesh(result)) is None or not result.name.startswith("tangents"):
            continue
        own = (node for node in joint.graph.nodes if not node.name.startswith("tangents") and mesh(node) == found)
        results[i] = next(own, result)
    output.args = (type(output.args[0])(results),)


def source_digest() -> str:
    """Digest of the sources of the passes and of all that shapes a program, for cache keys."""
    root = Path(__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted([*root.glob("*.py"), *(root / "passes").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# A compiler of AOTAutograd's: gets a graph and example inputs, returns a callable that takes a list of arguments.
GraphCompiler = Callable[..., Callable[[list[Any]], Sequence[Any]]]


def compile_region_inductor(
    gm: GraphModule, inputs: Sequence[Any], compiler: GraphCompiler, partitioner: CustomPartitionerFn
) -> Callable[..., Any]:
    """Compiles a Dynamo graph with Inductor's front end; `compiler(gm, inputs, direction=..., **kwargs)` lowers each
    graph.
    """

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return compiler(graph, example_inputs, direction=_direction(kwargs), **kwargs)

    compiled: Any = compile_fx(
        gm,
        inputs,
        inner_compile=inner,
        # As config_patches, never around the call: backward is compiled later, outside any `with`.
        config_patches={**INDUCTOR_PATCHES, "custom_partitioner_fn": partitioner},
    )
    function: Callable[..., Any] = compiled
    return function


def _direction(kwargs: dict[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def compile_region_aot(
    gm: GraphModule, inputs: Sequence[Any], compiler: GraphCompiler, partitioner: CustomPartitionerFn
) -> Callable[..., Any]:
    """Runs a Dynamo graph through AOTAutograd; `compiler` gets each graph, which then runs as it is."""

    def named(direction: str) -> Callable[..., Any]:
        return lambda graph, example_inputs: compiler(graph, example_inputs, direction=direction)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=named("forward"),
        bw_compiler=named("backward"),
        inference_compiler=named("inference"),
        partition_fn=partitioner,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled


def compile_graph_inductor(
    gm: GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """Inductor's code for one lowered graph. Inductor gets a copy, which it rewrites unless its cache has the code."""
    compiled: Callable[[list[Any]], Any] = compile_fx_inner(GraphModule(gm, copy_graph(gm)), list(inputs), **kwargs)
    return compiled


def generated_code(compiled: object) -> str | None:
    """Source of the code that Inductor generated; None for anything else."""
    source = getattr(compiled, "source_code", None)
    return source if isinstance(source, str) else None


@dataclass(frozen=True)
class CompileState:
    """The contexts of a compilation, so that another program of the same region can be compiled long after it."""

    tracing_context: Any
    compile_context: Any
    fake_mode: Any
    patches: dict[str, Any]

    @staticmethod
    def capture(patches: dict[str, Any]) -> CompileState:
        return CompileState(TracingContext.try_get(), CompileContext.try_get(), V.fake_mode, patches)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Enters the contexts again."""
        with ExitStack() as stack:
            stack.enter_context(tracing(self.tracing_context))
            if self.compile_context is not None:
                stack.enter_context(compile_context(self.compile_context))
            stack.enter_context(V.set_fake_mode(self.fake_mode))
            stack.enter_context(inductor_config.patch(self.patches))
            yield


def copy_graph(gm: GraphModule) -> Graph:
    """A graph of its own that reads the attributes of `gm`: a deepcopy of the module fails while a fake mode is on."""
    graph = Graph(owning_module=gm)
    graph.output(graph.graph_copy(gm.graph, {}))
    old_output, new_output = (next(iter(g.find_nodes(op="output"))) for g in (gm.graph, graph))
    new_output.meta = dict(old_output.meta)
    return graph


def log_artifact(name: str, text: str) -> None:
    """Hands a dump to torch's structured log (tlparse)."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def is_torch_operator(target: object) -> TypeGuard[Any]:
    """Whether the target of a node is an operator with a schema."""
    return isinstance(target, torch._ops.OpOverload)


def eager_random_numbers() -> AbstractContextManager[None]:
    """Inside, Inductor's code draws eager's random numbers instead of its own: for comparisons, not for speed."""
    context: AbstractContextManager[None] = inductor_config.patch(fallback_random=True)
    return context


def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__`, hooks included, whatever `module`'s class makes of a call."""
    return nn.Module.__call__(module, *args, **kwargs)


def hooks_of(module: nn.Module) -> Iterator[tuple[int, Callable[..., Any]]]:
    """(Key, hook) of every forward and backward hook of `module`. Keys are never used twice in a process."""
    forward, backward = module._forward_hooks, module._backward_hooks
    for hooks in (module._forward_pre_hooks, forward, module._backward_pre_hooks, backward):
        yield from hooks.items()


def compiled_function_node(outputs: Sequence[Tensor]) -> Any:
    """The autograd node of the compiled region that produced `outputs`, or None. Views of them are looked through."""
    found = [node for output in outputs if (node := _behind_views(output.grad_fn)) is not None]
    return max(found, key=lambda node: node._sequence_nr(), default=None)  # not that of the region before, of an input


def _behind_views(node: Any) -> Any:
    for _ in range(100):
        if node is None or "CompiledFunction" in type(node).__name__:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def size_hint(size: int | torch.SymInt, fallback: int) -> int:
    """The number that a symbolic size had when it was traced, without a guard; `fallback` where it depends on data."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = getattr(symbolic_shapes, "optimization_hint", None)
    if hint is not None:
        return int(hint(size, fallback=fallback))
    return int(size.node.hint) if size.node.has_hint() else fallback
