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
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from graphshard.compat.random_calls import call_of
from graphshard.cost.rates import Hardware
from graphshard.cost.traffic import aten, is_free, is_mutation, is_view, num_bytes, read_bytes, shape, tensors

# Inductor calls them from libraries, besides what has FLOPs.
_CALLED = frozenset(
    {aten.sort, aten.topk, aten.nonzero, aten.unique_dim, aten.histc, aten.bincount, aten.randperm, aten.multinomial}
)
# Inductor's `max_fusion_size`: no kernel has more operators.
_MAX_FUSED = 64


def graph_us(hardware: Hardware, graph: Graph, *, fused: bool) -> dict[Node, float]:
    """Microseconds of each node; 0.0 of placeholders, views, markers, collectives and waits.

    Sizes are those that symbolic ones had when they were traced.

    Args:
        hardware: that it runs on.
        graph: whose nodes have their fake values in ``meta["val"]``.
        fused: whether Inductor compiles the graph.
    """
    kernels, flops = _Kernels(graph) if fused else None, dict[str, int]()
    return {node: _node_us(hardware, node, kernels, flops) for node in graph.nodes}


def alone_us(hardware: Hardware, node: Node) -> float:
    """Microseconds of one node that shares its kernel with no other."""
    return _node_us(hardware, node, None, {})


def _node_us(hardware: Hardware, node: Node, kernels: _Kernels | None, flops: dict[str, int]) -> float:
    if is_free(node):
        return 0.0
    if formula := _formula(node):
        rate = _rate(hardware, node) * (hardware.attention_share if "attention" in str(call_of(node).target) else 1.0)
        flops_us = _flops(node, formula, flops) / (rate * 1e6)
        return max(flops_us, _bytes_us(hardware, _all_bytes(node)), hardware.kernel_us)
    if kernels is None or node not in kernels:
        return max(_bytes_us(hardware, _all_bytes(node)), hardware.kernel_us)
    launch_us = 0.0 if kernels.goes_on(node) else hardware.kernel_us
    return max(_bytes_us(hardware, kernels.outer_bytes(node)), launch_us)


def node_flops(node: Node) -> int:
    """Floating-point operations of a matmul, a convolution or attention; 0 of any other node."""
    formula = None if is_free(node) else _formula(node)
    return _flops(node, formula, {}) if formula else 0


@lru_cache(maxsize=4096)
def _is_generated(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", target)
    own = getattr(target, "namespace", "") in ("aten", "prims", "prim", "inductor_prims")
    return own and packet not in _CALLED and packet not in _FORMULAS and packet not in flop_registry


def _formula(node: Node) -> Callable[..., Any] | None:
    target = call_of(node).target
    packet: Any = getattr(target, "overloadpacket", target)
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


def _flops(node: Node, formula: Callable[..., Any], known: dict[str, int]) -> int:
    """`known`: of other nodes, by their operator and what they take."""
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

    call = call_of(node)
    args, kwargs = [plain(value) for value in call.args], {name: plain(value) for name, value in call.kwargs.items()}
    kwargs["out_val"] = plain(node.meta.get("val"))
    key = f"{call.target} {args} {kwargs}"
    if key not in known:
        flops = int(formula(*args, **kwargs))
        known[key] = flops // 2 if call.argument("is_causal") is True else flops
    return known[key]


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


class _Kernels:
    """The kernels that Inductor generates: what it generates code for, as long as it calls nothing from a library
    between.

    Args:
        graph: whose nodes `node in kernels` asks about.
    """

    def __init__(self, graph: Graph) -> None:
        self._place: dict[Node, int] = {}
        self._first: dict[Node, int] = {}  # place of the first that can be in one kernel with it
        self._read: dict[Node, int] = {}  # bytes that no node in front of it in its kernel has read or written
        self._views = {node for node in graph.nodes if is_view(node)}
        producers: dict[Node, Node] = {}  # which wrote the memory of a node
        readers: dict[Node, int] = {}  # place of the last that read what a node wrote
        first = place = 0
        for node in graph.nodes:
            source = node.args[0] if node in self._views and node.args else None
            producers[node] = producers[source] if isinstance(source, Node) else node
            if is_free(node):
                continue
            if not _is_generated(node.target):
                first = place
                continue
            begin = self._first[node] = max(first, place - _MAX_FUSED)
            self._place[node] = place
            read = [(source, producers[source]) for source in node.all_input_nodes]
            self._read[node] = sum(
                read_bytes(node, source)
                for source, producer in read
                if max(self._place.get(producer, -1), readers.get(producer, -1)) < begin
            )
            readers |= {producer: place for _, producer in read}
            place += 1

    def __contains__(self, node: Node) -> bool:
        return node in self._place

    def goes_on(self, node: Node) -> bool:
        """Whether the kernel of `node` has one behind it that reads its result."""
        return any(self._shares(node, user) for user in self._users(node))

    def outer_bytes(self, node: Node) -> int:
        """Bytes that pass between `node` and what is not in its kernel."""
        value = node.meta.get("val")
        written = 0
        results = list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]
        for index, result in results:
            if is_mutation(node) or any(not self._shares(node, user) for user in self._users(node, index)):
                written += sum(num_bytes(tensor) for tensor in tensors(result))
        return self._read[node] + written

    def _shares(self, earlier: Node, later: Node) -> bool:
        """Whether both are in one kernel."""
        return later in self._place and self._first[later] <= self._place[earlier] < self._place[later]

    def _users(self, node: Node, index: int | None = None) -> Iterator[Node]:
        """What reads the memory of `node`, through views; with `index`, what reads one of its results."""
        for user in node.users:
            if index is not None and user.op == "call_function" and len(user.args) == 2 and user.args[1] != index:
                continue
            if user in self._views:
                yield from self._users(user)
            else:
                yield user
