"""What the cost model knows of a machine: rates that programs achieve, latencies, and where each number comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

Algorithm = Literal["ring", "tree", "pat"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "pat")

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

# No machine is outside of these; within them every cost of a tensor that fits into memory is finite and above 0.
_MIN_RATE, _MAX_RATE = 1e-6, 1e9
_MAX_US = 1e9


@dataclass(frozen=True)
class Protocol:
    """One way a communication library moves bytes: what is quick for few bytes is slow for many.

    Attributes:
        name: of the protocol.
        base_us: of each collective.
        step_us: of one step between neighbours inside a node.
        network_step_us: of one step between nodes.
        link_share: of the bandwidth inside a node that it reaches, in (0, 1].
        network_share: of the bandwidth across nodes, in (0, 1]; 0: not used across nodes.
    """

    name: str
    base_us: float
    step_us: float
    network_step_us: float
    link_share: float = 1.0
    network_share: float = 1.0

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        _check("base_us", self.base_us, 0.0, _MAX_US, above=True)
        _check("step_us", self.step_us, 0.0, _MAX_US)
        _check("network_step_us", self.network_step_us, 0.0, _MAX_US)
        _check("link_share", self.link_share, 0.0, 1.0, above=True)
        _check("network_share", self.network_share, 0.0, 1.0)


@dataclass(frozen=True)
class Hardware:
    """Rates and latencies of one rank and of the links between ranks. GB are 10^9 bytes.

    Attributes:
        name: of the row or of the calibration.
        matmul_tflops: achieved by large matmuls, by dtype name; multiply and add are 2 FLOPs.
        attention_share: of the matmul rate that fused attention achieves.
        memory_gb_s: achieved by copies; bytes read plus bytes written.
        memory_bytes: of one rank.
        kernel_us: least time of one kernel.
        ranks_per_node: ranks whose links are those inside a node.
        link_gb_s: bus bandwidth inside a node, large messages.
        nic_gb_s: per rank across nodes.
        network_gb_s: greatest bus bandwidth across nodes, with every rank of a node taking part.
        protocols: of the communication library; the fastest is taken.
        algorithms: of the communication library: ``"ring"``, and ``"tree"`` and ``"pat"`` where it has them.
        kind_share: of the bandwidth that a kind of collective reaches, in (0, 1]; a kind not named reaches all of it.
        contention: compute runs at 1 / (1 + contention) of its rate while a collective is under way.
        sources: source of each number, by field.
    """

    name: str
    matmul_tflops: Mapping[str, float] = field(hash=False)
    attention_share: float
    memory_gb_s: float
    memory_bytes: int
    kernel_us: float
    ranks_per_node: int
    link_gb_s: float
    nic_gb_s: float
    network_gb_s: float
    protocols: tuple[Protocol, ...]
    algorithms: tuple[Algorithm, ...]
    contention: float
    kind_share: Mapping[str, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("matmul_tflops", "kind_share", "sources"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ValueError(f"{name}: got {value!r}, want numbers or texts by name")
            object.__setattr__(self, name, dict(value))
        _check_text("name", self.name)
        if not self.matmul_tflops:
            raise ValueError("matmul_tflops: got no dtype, want at least one, such as 'bfloat16'")
        for dtype, rate in self.matmul_tflops.items():
            _check(f"matmul_tflops.{dtype}", rate, _MIN_RATE, _MAX_RATE)
        for name in ("memory_gb_s", "link_gb_s", "nic_gb_s", "network_gb_s"):
            _check(name, getattr(self, name), _MIN_RATE, _MAX_RATE)
        if unknown := sorted(set(self.kind_share) - set(KINDS)):
            raise ValueError(f"kind_share: got unknown {', '.join(map(str, unknown))}, want some of {', '.join(KINDS)}")
        for kind, share in self.kind_share.items():
            _check(f"kind_share.{kind}", share, _MIN_RATE, 1.0)
        _check("attention_share", self.attention_share, _MIN_RATE, 1.0)
        _check("kernel_us", self.kernel_us, 0.0, _MAX_US, above=True)
        _check("contention", self.contention, 0.0, _MAX_RATE)
        for name in ("memory_bytes", "ranks_per_node"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: got {value!r}, want an integer above 0")
        if not self.protocols or not any(protocol.network_share for protocol in self.protocols):
            raise ValueError("protocols: got none that is used across nodes, want at least one")
        if "ring" not in self.algorithms or not set(self.algorithms) <= set(ALGORITHMS):
            raise ValueError(f"algorithms: got {list(self.algorithms)}, want 'ring' and others of {list(ALGORITHMS)}")
        wanted = {entry.name for entry in fields(self)} - {"name", "sources"}
        if set(self.sources) != wanted:
            raise ValueError(
                f"sources: missing {sorted(wanted - set(self.sources))}, unknown {sorted(set(self.sources) - wanted)}; "
                "every field but the name has one"
            )
        for name, text in self.sources.items():
            _check_text(f"sources.{name}", text)


def _check(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Raises:
    ValueError: if `value` is not a finite number between `low` (itself left out, where `above`) and `high`.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (above and value == low):  # type: ignore[arg-type, operator]
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        raise ValueError(f"{name}: got {value!r}, want a finite number {bounds} and at most {high:g}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}: got {value!r}, want a text")
