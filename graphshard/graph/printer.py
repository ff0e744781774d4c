"""One line per node: ``%wait = wait_tensor(%all_gather) : bf16[1024, 256]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphshard.graph.ir import collective, output_args, val

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def format_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bf16``."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def format_type(value: Any) -> str:
    """A fake value's dtype and shape: ``f32[8, 16]``."""
    if isinstance(value, Tensor):
        return f"{format_dtype(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_type(item) for item in value)})"
    return "None" if value is None else type(value).__name__


def format_arg(arg: Any) -> str:
    """An argument: nodes as ``%name``, dtypes short, lists by element."""
    if isinstance(arg, Node):
        return f"%{arg.name}"
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(format_arg(item) for item in arg)}]"
    if isinstance(arg, torch.dtype):
        return format_dtype(arg)
    return repr(arg) if isinstance(arg, str) else str(arg)


def format_node(node: Node) -> str:
    """One node; a launch also says its bucket and its parameters."""
    if node.op == "output":
        return f"return {', '.join(format_arg(arg) for arg in output_args(node.graph))}"
    type_ = f" : {format_type(val(node))}" if "val" in node.meta else ""
    if node.op == "placeholder":
        return f"%{node.name} = placeholder{type_}"
    if node.op == "get_attr":
        return f"%{node.name} = attr {node.target}{type_}"
    target = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", str(node.target))
    args = [format_arg(arg) for arg in node.args] + [f"{key}={format_arg(arg)}" for key, arg in node.kwargs.items()]
    line = f"%{node.name} = {target}({', '.join(args)}){type_}"
    if (carried := collective(node)) is not None:
        line += f"  # {carried.bucket}: {', '.join(member.fqn for member in carried.members)}"
    return line


def format_graph(graph: Graph, around: Node | None = None, reach: int = 6) -> str:
    """The whole graph, or `reach` lines on each side of `around`, which is pointed at."""
    nodes = list(graph.nodes)
    if around is None:
        return "\n".join(format_node(node) for node in nodes) + "\n"
    at = nodes.index(around) if around in nodes else 0
    shown = range(max(0, at - reach), min(len(nodes), at + reach + 1))
    return "\n".join(("> " if nodes[i] is around else "  ") + format_node(nodes[i]) for i in shown) + "\n"
