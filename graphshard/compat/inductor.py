"""The compilers behind Dynamo: AOTAutograd and Inductor, each behind a plain function."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.utils import dynamo_timed
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from graphshard.compat.body_strides import InStrides, other_strides
from graphshard.compat.compile_phases import UNCOMPILED_FORWARD

log = logging.getLogger(__name__)

# A compiler of AOTAutograd's: gets a graph and example inputs, returns a callable that takes a list of arguments.
GraphCompiler = Callable[..., Callable[[list[Any]], Sequence[Any]]]

# Inductor's own reordering would undo every prefetch: in forward all-gathers move to their use, in inference all of
# them move to the top, in backward reduce-scatters move to the end. With both off it keeps the order of the FX graph.
INDUCTOR_PATCHES: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
}
if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # since torch 2.15, on
    INDUCTOR_PATCHES["aten_distributed_optimizations.enable_simple_overlap"] = False


def source_digest() -> str:
    """Digest of torch's version and of all sources of graphshard, for cache keys."""
    return hashlib.sha256(f"{torch.__version__} {_sources()}".encode()).hexdigest()


@cache
def _sources() -> str:
    """Digest of what this process runs, or nearly: it has imported most of it."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Before(CustomGraphPass):
    """A pass before Inductor's own on joint graphs, and before those that the user has there."""

    def __init__(self, run: Callable[[Graph], None], key: Any, others: Any) -> None:
        self._run, self._key = run, key
        self._others = others if isinstance(others, (list, tuple)) else [others] if others else []

    def __call__(self, graph: Graph) -> None:
        for run in (self._run, *self._others):
            run(graph)

    def uuid(self) -> Any:
        """None: one of them has none, and nothing is cached."""
        keys = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self._others]
        return [self._key, *keys] if all(keys) else None


def compile_region_inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    compiler: GraphCompiler,
    partitioner: CustomPartitionerFn,
    before: Callable[[Graph], None],
) -> Callable[..., Any]:
    """Compiles a Dynamo graph with Inductor's front end; `compiler(gm, inputs, direction=..., **kwargs)` lowers each
    graph. `before`: changes joint graphs before Inductor's passes do.
    """

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return compiler(graph, example_inputs, direction=_direction(kwargs), **kwargs)

    compiled: Any = compile_fx(
        gm,
        inputs,
        inner_compile=inner,
        # As config_patches, never around the call: backward is compiled later, outside any `with`.
        config_patches={
            **INDUCTOR_PATCHES,
            "custom_partitioner_fn": partitioner,
            "joint_custom_pre_pass": _Before(before, partitioner.uuid(), inductor_config.joint_custom_pre_pass),
        },
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

    # Timed as Inductor's front end times its own: `compile_phases`.
    def forward(direction: str) -> Callable[..., Any]:
        def compile_forward(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
            with dynamo_timed(UNCOMPILED_FORWARD):
                return compiler(graph, example_inputs, direction=direction)

        return compile_forward

    def backward(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compiler(graph, example_inputs, direction="backward")

    def split(joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with dynamo_timed(type(partitioner).__name__):
            return partitioner(joint, joint_inputs, **kwargs)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=forward("forward"),
        bw_compiler=backward,
        inference_compiler=forward("inference"),
        partition_fn=split,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled


def compile_graph_inductor(
    gm: GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """Inductor's code for one lowered graph. Inductor gets a copy, which it rewrites unless its cache has the code."""

    def compiled() -> Any:
        return compile_fx_inner(GraphModule(gm, copy_graph(gm)), list(inputs), **kwargs)

    code: Callable[[list[Any]], Any] = with_whole_libraries(compiled)
    return code


def compile_body(gm: GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Inductor's code for a part of a program, whose results have the strides that they have in the graph.

    Args:
        gm: the part. Inductor gets a copy.
        inputs: fake values of its arguments.
        kwargs: of the whole program.

    Raises:
        StridesUnknown: these depend on sizes that no argument tells.
    """
    output = next(iter(gm.graph.find_nodes(op="output")))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    kwargs = {name: value for name, value in kwargs.items() if name != "static_input_idxs"}
    with _apart():
        code = compile_graph_inductor(gm, [*map(_by_its_symbol, inputs)], kwargs)
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in output.args[0]]
    given: Sequence[Any] = getattr(code, "output_strides", [None] * len(values))  # none: the graph calls nothing
    others = other_strides(given, values)
    return InStrides(code, others, inputs) if others else code


def _by_its_symbol(value: Any) -> Any:
    """A size whose symbol has turned out to be equal to another one, by that one: Inductor has arguments define the
    symbols that they came with, and a part of a program may have no tensor that defines the other.
    """
    if not isinstance(value, torch.SymInt) or value.node._expr == value.node.expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def with_whole_libraries(compiled: Callable[[], Any]) -> Any:
    """``compiled()``; once more for each library in Inductor's cache that cannot be loaded, which is removed first.

    The C++ compiler writes it under its name at once: where it was ended on the way, each later process would fail.
    """
    removed: set[Path] = set()
    while True:
        try:
            return compiled()
        except Exception as error:
            library, why = _damaged_library(error)
            if library is None or library in removed:
                raise
            removed.add(library)
        log.warning("graphshard: cache: Inductor's library %s is compiled again, for it is damaged: %s", library, why)
        library.unlink(missing_ok=True)


def _damaged_library(error: BaseException | None) -> tuple[Path | None, str]:
    """That which an error is about, and what it says."""
    while error is not None:
        path = getattr(error, "path", None)
        if isinstance(error, ImportError) and path and Path(path).is_relative_to(cache_dir()):
            return Path(path), str(error)
        error = error.__cause__ or error.__context__
    return None, ""


@contextmanager
def _apart() -> Iterator[None]:
    """Hides where Inductor reports the strides of the results of the whole program."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported


def keep_what_forward_saves() -> None:
    """Tells AOTAutograd, while it compiles a forward, that backward overwrites nothing of what that saves: it may run
    again. Inductor would find by position in the whole backward what it may overwrite, and compiles only parts of it.
    """
    metadata: Any = TracingContext.get().fw_metadata
    metadata.bw_donated_idxs = []


def argument_position(placeholder: Node) -> int | None:
    """Position of what a placeholder stands for among the arguments of the graph that AOTAutograd has traced; None: it
    stands for a part of one, as of a DTensor, or for what the graph holds itself.
    """
    described = placeholder.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


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


def module_of(root: Any, graph: Graph) -> GraphModule:
    """A graph module whose Python code is written when it is first called or read, if ever.

    Args:
        root: has what `graph` reads: a module, or a dict of names.
        graph: becomes the module's.
    """
    module: GraphModule = _LazyGraphModule(root, graph)
    return module


def module_like(gm: GraphModule, graph: Graph) -> GraphModule:
    """`module_of` with all that is said of another module."""
    other = module_of(gm, graph)
    for name, value in vars(gm).items():
        vars(other).setdefault(name, value)
    other.meta = gm.meta
    return other


def eager_random_numbers() -> AbstractContextManager[None]:
    """Inside, Inductor's code draws eager's random numbers instead of its own: for comparisons, not for speed."""
    context: AbstractContextManager[None] = inductor_config.patch(fallback_random=True)
    return context
