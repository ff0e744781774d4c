"""What is private of torch about results that a program has besides those of its graph."""

from __future__ import annotations

from typing import Any

from torch._guards import TracingContext
from torch.fx import Node


def keep_strides(output: Node, count: int) -> None:
    """Makes Inductor lay the last `count` results of a graph out as their fake values are: it is free to choose."""
    results: Any = output.args[0]
    first = len(results) - count
    visible = list(output.meta.get("user_visible_output_idxs", ()))
    output.meta["user_visible_output_idxs"] = [*visible, *range(first, len(results))]
    if (recorded := output.meta.get("original_output_strides")) is not None:  # torch 2.15 keeps what is there
        own = [*recorded, *[None] * (first - len(recorded))][:first]
        output.meta["original_output_strides"] = [*own, *(node.meta["val"].stride() for node in results[first:])]


def hide_results(count: int) -> None:
    """Keeps the last `count` results of the graph just compiled from AOTAutograd, which takes strides from the end."""
    context = TracingContext.try_get()
    strides = None if context is None else context.output_strides
    if count and strides:
        del strides[-count:]
