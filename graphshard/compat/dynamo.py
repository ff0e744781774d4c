"""What is private of Dynamo: what it captures, what it leaves alone, where it breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor
from torch._C._functorch import _vmap_decrement_nesting, maybe_current_level
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import SkipFrame
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import ConstantSource, RandomValueSource
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as _unchecked
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch.distributed import _functional_collectives
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel, sdpa_kernel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from graphshard.compat.inductor import copy_graph
from graphshard.compat.once_logs import OnceLogs
from graphshard.compat.tensors import fake_mode_of, is_plain_fake

C = TypeVar("C", bound=Callable[..., Any])

# Dynamo traces what forward asks of autograd. What draws random numbers by numpy breaks the graph, for they would be
# other ones.
_CAPTURES = {"trace_autograd_ops": True, "use_numpy_random_stream": True}


@contextmanager
def capture_settings() -> Iterator[None]:
    """Inside, what is captured looks whether modules have hooks where they had none: else frames around modules, behind
    graph breaks, would be the same for modules with hooks and without. And what is logged once breaks no graph, nor
    does `torch.autograd.grad`.
    """
    # Not by `config.patch`: each leaves a variable in the thread's context for good.
    skip, logs = dynamo_config.skip_nnmodule_hook_guards, dynamo_config.ignore_logging_functions
    if not skip and isinstance(logs, OnceLogs):
        yield
        return
    before = {name: getattr(dynamo_config, name) for name in _CAPTURES if hasattr(dynamo_config, name)}
    dynamo_config.skip_nnmodule_hook_guards = False
    dynamo_config.ignore_logging_functions = OnceLogs(logs)
    for name in before:
        setattr(dynamo_config, name, _CAPTURES[name])
    try:
        yield
    finally:
        dynamo_config.skip_nnmodule_hook_guards = skip
        dynamo_config.ignore_logging_functions = logs
        for name, value in before.items():
            setattr(dynamo_config, name, value)


def is_compiled_module(module: object) -> bool:
    """Whether it is what `torch.compile` makes of a module."""
    return isinstance(module, OptimizedModule)


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


def without_dynamic_marks(*values: Any) -> None:
    """Takes off tensors the marks of sizes that were symbols in the graph which they come from: each capture would make
    symbols of them, also with `dynamic=False`.
    """
    for value in tree_leaves(values):
        if hasattr(value, "_dynamo_propagated_dynamic_indices"):  # since torch 2.13
            del value._dynamo_propagated_dynamic_indices


def uncaptured(function: C) -> C:
    """Keeps Dynamo out of `function` and of all that it calls, except for what is compiled on purpose."""
    disabled: C = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def inline_only(function: C) -> C:
    """Lets Dynamo inline `function` in a trace, but never capture its frame by itself: each call outside a trace is
    plain Python.
    """
    code = function.__code__
    inside = (value for value in code.co_consts if isinstance(value, CodeType) and value.co_name.startswith("<"))
    for own in (code, *inside):  # comprehensions have frames of their own before Python 3.12
        skip_code(own)
    return function


def _checked_at_end(change: Callable[..., None], *args: Any) -> None:
    change(*args)


# Calls `change(*args)`, which sets a flag that is put back in the same block, in a trace, too. In a checkpoint torch
# 2.13 looks at the end whether it is; what cannot wait so long would make a graph break of any change there.
put_back_later: Callable[..., None]
if hasattr(SideEffects, "defer_side_effect_checks"):
    put_back_later = inline_only(_checked_at_end)
else:
    put_back_later = _unchecked


def tell_of_compiles(begin: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Has `begin` called when Dynamo begins to compile, and `end` when it has ended; once, however often it is asked.

    `torch.compiler.reset` makes torch forget it. Both must be `uncaptured`: torch calls them in compiled frames too, as
    when AOTAutograd compiles a backward, and holds a lock that a trace of theirs would wait for.
    """
    if begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)


def ends_in_graph_break(gm: GraphModule) -> bool:
    """Whether Dynamo ended a captured graph before its frame ended."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return bool(getattr(reason, "graph_break", False))


def leave_frame(why: str) -> NoReturn:
    """In a backend: has Dynamo run the frame whose graph it is given as it is; what it calls may still be compiled."""
    raise SkipFrame(why)


def sets_grad_mode(node: Node) -> bool | None:
    """What a node of a captured graph switches gradients to; None if it does not."""
    if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
        return bool(node.args[0])
    return None


# What it captures `tensor.data` as.
DATA: Callable[[torch.Tensor], torch.Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def writes_for_c10d(copy: Node) -> bool:
    """Whether Dynamo has put a `copy_` of a captured graph in the place of what a collective of `torch.distributed`
    writes: it copies what the functional form of that yields.
    """
    frame = (copy.stack_trace or "").rpartition('File "')[2]
    return frame.startswith(_functional_collectives.__file__)


# What is in effect around operators: autocast, `torch.vmap`. What that, or `sdpa_kernel`, needs to have is no change.
_DEPTHS = {
    "_backend_from_string": 0,
    "_enter_autocast": 1,
    "_exit_autocast": -1,
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
    "lazy_load_decompositions": 0,
}


def changes_mode(node: Node) -> int | None:
    """1: a node of a captured graph enters autocast or `torch.vmap`, -1: it leaves one, 0: it needs to be there, but
    changes nothing; None: it does something else.
    """
    return _DEPTHS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None


class AttentionKernels(NamedTuple):
    """The kernels that `scaled_dot_product_attention` may take, and all of them by priority."""

    allowed: frozenset[SDPBackend]
    priority: tuple[int, ...]

    @classmethod
    def now(cls) -> AttentionKernels:
        """Those that are set."""
        return cls(frozenset(_cur_sdpa_kernel_backends()), tuple(map(int, torch._C._get_sdp_priority_order())))

    def behind(self, node: Node) -> AttentionKernels | None:
        """Those behind a node of a captured graph that sets them (`sdpa_kernel`); None: it does something else."""
        if node.op != "call_function" or node.target is not _sdpa_kernel:
            return None
        named, sets_priority = node.args
        names = [name.args[0] for name in named if isinstance(name, Node)]  # type: ignore[union-attr]
        if not all(name in SDPBackend.__members__ for name in names) or len(names) < len(named):  # type: ignore[arg-type]
            return None
        found = [SDPBackend.__members__[str(name)] for name in names]
        first = [int(backend) for backend in found] if sets_priority else []  # type: ignore[call-overload]
        return AttentionKernels(frozenset(found), (*first, *(one for one in self.priority if one not in first)))


@contextmanager
def modes_kept() -> Iterator[None]:
    """Behind it that is in effect which was in front of it, even if what runs inside fails between entering a mode and
    leaving it.
    """
    level = maybe_current_level() or 0
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(sdpa_kernel(_cur_sdpa_kernel_backends(with_priority=True), set_priority=True))
        accelerator = torch.accelerator.current_accelerator()
        for device in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            stack.enter_context(torch.autocast(device, dtype, enabled))
        try:
            yield
        finally:
            while (maybe_current_level() or 0) > level:
                _vmap_decrement_nesting()


def only_logs(node: Node) -> bool:
    """Whether a node of a captured graph tells torch that an API is used, as one does for a module that is made in
    forward: a slice of an `nn.ModuleList` is one.
    """
    return node.target is torch._C._log_api_usage_once


def is_wrapper(value: Tensor) -> bool:
    """Whether a tensor stands for others, as a DTensor does."""
    found: bool = is_traceable_wrapper_subclass(value)
    return found


def is_random(node: Node) -> bool:
    """Whether an input of a captured graph is a random number of Python's."""
    return isinstance(getattr(node, "_dynamo_source", None), RandomValueSource)


def is_static_input(node: Node) -> bool:
    """Whether an input of a captured graph is there for good, as a parameter is: AOTAutograd's partitioner saves it for
    nothing.
    """
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def add_input(graph: Graph, like: tuple[Node, Tensor], value: Tensor, name: str) -> Node:
    """A placeholder of a captured graph for a tensor that Dynamo has not met, at the graph's insertion point.

    Args:
        graph: the captured one.
        like: an input that Dynamo has, which it resembles: of another parameter, another buffer.
        value: the tensor.
        name: unlike that of any other.
    """
    node, (other, known) = graph.placeholder(name), like
    contexts = TracingContext.get().tensor_to_context
    source = ConstantSource(name)
    if known in contexts:  # says which sizes are symbols
        contexts[value] = dataclasses.replace(contexts[known], tensor_source=source)
    fake = value
    if not is_plain_fake(value):
        fake = fake_mode_of(other.meta["example_value"]).from_tensor(value, static_shapes=True)
    node.meta = {**other.meta, "example_value": fake}
    node.meta.pop("grapharg", None)
    node._dynamo_source = source
    return node


def checkpoint_policy(inner: GraphModule) -> object:
    """The `context_fn` of the checkpoint that an inner graph is; None: it has none."""
    return inner.meta.get("_checkpoint_context_fn")


def checkpoint_graph(gm: GraphModule, node: Node) -> GraphModule | None:
    """The graph that a node of a captured one checkpoints; None: it is no checkpoint."""
    if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
        return None
    body: Any = node.args[0]
    found: GraphModule = getattr(gm, body.target)
    return found


def copy_captured(gm: GraphModule) -> Graph:
    """A copy of a captured graph that AOTAutograd takes for it."""
    graph = copy_graph(gm)
    for node, copy in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):  # of an argument
            copy._dynamo_source = node._dynamo_source
    return graph
