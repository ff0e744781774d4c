"""What is private of autograd's engine: the running backward, what it will reach, where it accumulates."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the running backward pass ends. Must be called from within a backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Number of the backward pass that runs in this thread, -1 for none."""
    return torch._C._current_graph_task_id()


def recomputes() -> bool:
    """Whether a checkpoint is recomputed: in backward nothing else records gradients, but for those of gradients."""
    return torch.is_grad_enabled() and backward_id() != -1


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


def half_of_backward() -> str | None:
    """``"input"`` or ``"weight"`` where a pipeline stage begins that half of a backward: it asks its module for
    `parameters` then, which is the caller's caller's caller.
    """
    halves: Any = sys.modules.get("torch.distributed.pipelining._backward")
    if halves is None:
        return None
    parameters = sys._getframe(3)
    if parameters.f_code is not nn.Module.parameters.__code__ or parameters.f_back is None:
        return None
    codes = {halves.stage_backward_input.__code__: "input", halves.stage_backward_weight.__code__: "weight"}
    return codes.get(parameters.f_back.f_code)


def a_stage_asks_for_inputs() -> bool:
    """Whether a pipeline stage runs the half of a backward for its input, in whichever thread."""
    halves: Any = sys.modules.get("torch.distributed.pipelining._backward")
    frames = [] if halves is None else list(sys._current_frames().values())
    for frame in frames:  # grows
        if frame.f_code is halves.stage_backward_input.__code__:
            return True
        if frame.f_back is not None:
            frames.append(frame.f_back)
    return False


def keeps_graph() -> bool:
    """Whether the running backward pass was asked to keep its graph (retain_graph or create_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved_tensor_hooks() -> object:
    """The innermost hooks that pack what autograd saves now, such as a checkpoint's; None: there are none."""
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def compiled_function_node(outputs: Sequence[Tensor]) -> tuple[Any, tuple[int, ...]]:
    """The autograd node of the compiled region that produced `outputs`, or None. Views of them are looked through.

    Returns:
        The node, and the numbers of those of its outputs that these are, or are views of.
    """
    found = [behind for output in outputs if (behind := _behind_views(output)) is not None]
    node = max((node for node, _ in found), key=lambda node: node._sequence_nr(), default=None)
    return node, tuple(sorted({number for own, number in found if own is node}))  # not the region before, of an input


def _behind_views(output: Tensor) -> tuple[Any, int] | None:
    node: Any = output.grad_fn
    number = output.output_nr
    for _ in range(100):
        if node is None or "CompiledFunction" in type(node).__name__:
            break
        node, number = node.next_functions[0] if node.next_functions else (None, 0)
    return None if node is None or "CompiledFunction" not in type(node).__name__ else (node, number)


@contextmanager
def quiet(function: str) -> Iterator[None]:
    """Inside, torch does not print where the forward was called of an autograd function of this class whose backward
    raises: while it traces, it looks for what went wrong, whether somebody handles it or not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"Error detected in {function}Backward")
        yield
