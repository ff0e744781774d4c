"""Tensors whose sizes depend on values, in traces of graphs that have none for Dynamo: gradients of ``x[mask] = y``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

T = TypeVar("T")


def with_sizes_of_values(trace: Callable[[], T]) -> T:
    """Traces a captured graph, which may have such sizes; once more without, where torch fails with some.

    Dynamo ends a graph in front of an operator whose result has one, unless ``capture_dynamic_output_shape_ops`` says
    otherwise. Of one in the backward it cannot know: it would end the graph behind ever fewer operators.
    """
    shapes = _shapes()
    if shapes is None or shapes.allow_dynamic_output_shape_ops:
        return trace()
    settings, known = shapes.settings, _sizes_of_values(shapes)
    shapes.settings = replace(settings, allow_dynamic_output_shape_ops=True)  # for what is compiled later, too
    try:
        return trace()
    except Exception:
        if _sizes_of_values(shapes) == known:
            raise
        shapes.settings = settings
    return trace()


def _shapes() -> ShapeEnv | None:
    context = TracingContext.try_get()
    fake_mode = None if context is None else context.fake_mode
    return None if fake_mode is None else fake_mode.shape_env


def _sizes_of_values(shapes: ShapeEnv) -> int:
    """How many there are."""
    return sum(str(symbol).startswith("u") for symbol in shapes.var_to_range)
