"""Time of one aten node: a roofline of what it computes and what it moves.

    matmul, convolution, attention   max(FLOPs / achieved rate, bytes / copy rate, kernel_us)
    any other operator               max(bytes / copy rate, kernel_us)

Inductor fuses what it generates code for. With `fused`, such operators between two that it calls from libraries are one
kernel: values that pass between them are neither written nor read, what comes from outside is read once, and only the
last operator of a chain pays for the launch. Without (``"aot_eager"``), each pays all of its traffic and its launch.

FLOPs are those of `torch.utils.flop_counter`; where the operator says `is_causal`, half of them. Left out: how much
slower small or odd matmuls are than large ones, caches, and what Inductor computes twice rather than keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from graphshard.cost.rates import Hardware
from graphshard.cost.traffic import aten, is_free, is_mutation, is_view, num_bytes, read_bytes, shape, tensors

# Inductor calls them from libraries, besides what has FLOPs.
_CALLED = frozenset(
    {aten.sort, aten.topk, aten.nonzero, aten.unique_dim, aten.histc, aten.bincount, aten.randperm, aten.multinomial}
)
# Inductor's `max_fusion_size`: no kernel has more operators.
_MAX_FUSED = 64


def node_us(hardware: Hardware, node: Node, *, fused: bool) -> float:
    """Microseconds of one node; 0.0 for placeholders, views, markers, collectives and waits.

    Sizes are those that symbolic ones had when they were traced.

    Args:
        hardware: that it runs on.
        node: with its fake value in ``meta["val"]``, as its inputs.
        fused: whether Inductor compiles the graph.
    """
    if is_free(node):
        return 0.0
    if formula := _formula(node):
        rate = _rate(hardware, node) * (hardware.attention_share if "attention" in str(node.target) else 1.0)
        flops_us = _flops(node, formula) / (rate * 1e6)
        return max(flops_us, _bytes_us(hardware, _all_bytes(node)), hardware.kernel_us)
    if not fused or not is_fusible(node):
        return max(_bytes_us(hardware, _all_bytes(node)), hardware.kernel_us)
    launches = not any(_is_internal(node, user) for user in _users(node))
    return max(_bytes_us(hardware, _fused_bytes(node)), hardware.kernel_us if launches else 0.0)


def node_flops(node: Node) -> int:
    """Floating-point operations of a matmul, a convolution or attention; 0 of any other node."""
    formula = None if is_free(node) else _formula(node)
    return _flops(node, formula) if formula else 0


def is_fusible(node: Node) -> bool:
    """Whether Inductor generates code for `node`, so that it can share a kernel with its neighbours."""
    return _is_generated(node.target) and not is_free(node)


@lru_cache(maxsize=4096)
def _is_generated(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", target)
    own = getattr(target, "namespace", "") in ("aten", "prims", "prim", "inductor_prims")
    return own and packet not in _CALLED and packet not in _FORMULAS and packet not in flop_registry


def _formula(node: Node) -> Callable[..., Any] | None:
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return _FORMULAS.get(packet) or flop_registry.get(packet)


def _grouped_mm_flops(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Matmuls of groups of rows, of columns or of the inner dim: each row and column of a group once."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * math.prod(a[-2:]) * b[-1]


_flash, _flash_backward = (
    flop_registry[packet]
    for packet in (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward)  # noqa: SLF001
)
# What the registry lacks.
_FORMULAS: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_fused_attention_overrideable: _flash,  # noqa: SLF001
    aten._scaled_dot_product_fused_attention_overrideable_backward: _flash_backward,  # noqa: SLF001
    aten._grouped_mm: _grouped_mm_flops,  # noqa: SLF001
    aten._scaled_grouped_mm: _grouped_mm_flops,  # noqa: SLF001
}


def _flops(node: Node, formula: Callable[..., Any]) -> int:
    # Formulas that were registered for shapes unwrap tensors; the others want something that has a shape.
    is_raw = not hasattr(formula, "__wrapped__") and formula is not _grouped_mm_flops

    def plain(value: Any) -> Any:
        if isinstance(value, Node):
            return plain(value.meta.get("val"))
        if isinstance(value, Tensor):
            return torch.empty(shape(value), dtype=value.dtype, device="meta") if is_raw else shape(value)
        if isinstance(value, (list, tuple)):
            return type(value)(plain(item) for item in value)
        return value

    args, kwargs = [plain(value) for value in node.args], {name: plain(value) for name, value in node.kwargs.items()}
    flops = int(formula(*args, **kwargs, out_val=plain(node.meta.get("val"))))
    return flops // 2 if _is_causal(node) else flops


def _is_causal(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "is_causal":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("is_causal", argument.default_value)
            return given is True
    return False


def _rate(hardware: Hardware, node: Node) -> float:
    """TFLOP/s for the dtype of what `node` reads; where the machine's table lacks it, the slowest that it has."""
    sources = (tensor for source in node.all_input_nodes for tensor in tensors(source.meta.get("val")))
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in sources if tensor.is_floating_point()), "")
    if dtype.startswith("float8"):
        dtype = "float8_e4m3fn"
    return hardware.matmul_tflops.get(dtype) or min(hardware.matmul_tflops.values())


def _bytes_us(hardware: Hardware, count: int) -> float:
    return count / (hardware.memory_gb_s * 1e3)


def _all_bytes(node: Node) -> int:
    read = sum(read_bytes(node, source) for source in node.all_input_nodes)
    return read + sum(num_bytes(tensor) for tensor in tensors(node.meta.get("val")))


def _fused_bytes(node: Node) -> int:
    """Bytes that pass between `node` and what is not in its kernel."""
    before = list(_in_front(node))
    there = {*before, *(_producer(source) for earlier in before for source in earlier.all_input_nodes)}
    read = sum(read_bytes(node, source) for source in node.all_input_nodes if _producer(source) not in there)
    value = node.meta.get("val")
    written = 0
    results = list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]
    for index, result in results:
        if is_mutation(node) or any(not _is_internal(node, user) for user in _users(node, index)):
            written += sum(num_bytes(tensor) for tensor in tensors(result))
    return read + written


def _producer(node: Node) -> Node:
    """The node that wrote the memory of `node`."""
    while is_view(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _users(node: Node, index: int | None = None) -> Iterator[Node]:
    """What reads the memory of `node`, through views; with `index`, what reads one of its results."""
    for user in node.users:
        if index is not None and user.op == "call_function" and len(user.args) == 2 and user.args[1] != index:
            continue
        if is_view(user):
            yield from _users(user)
        else:
            yield user


def _is_internal(earlier: Node, later: Node) -> bool:
    """Whether both are in one kernel: nothing that Inductor calls from a library lies between them."""
    return is_fusible(later) and any(node is earlier for node in _in_front(later))


def _in_front(node: Node) -> Iterator[Node]:
    """What is in one kernel with `node`, in front of it, from the last to the first."""
    before, seen = node.prev, 0
    while seen < _MAX_FUSED and before.op != "root":
        if not is_free(before):
            if not is_fusible(before):
                return
            seen += 1
            yield before
        before = before.prev
