"""Time of one collective: alpha (what it takes however few bytes there are) plus bytes over a bandwidth.

A communication library has several algorithms and protocols and takes the one it expects to be fastest; so does this
model, and its time is the least of theirs. For S bytes, P ranks on n nodes with g = P / n on each:

    ring   all-gather, reduce-scatter  base + (P - n) step + (n - 1) network_step       + S (P-1)/P / B
           all-reduce                  base + 2 ((P - n) step + (n - 1) network_step)   + 2 S (P-1)/P / B
    tree   all-reduce                  base + 2 ((g - 1) step + log2(n) network_step)   + 2 S / (0.92 B)
    pat    all-gather, reduce-scatter, one rank per node:
                                       8 + log2(n) network_step / 3.5 + 2.8 P           + S (P-1)/P / (0.75 B)

B is the bandwidth inside a node, and across nodes `min(link, g * nic, network)`: each rank brings its own NIC, and a
ring is no faster than its slowest hop. So a flat ring over very many ranks dies on latency (16,384 ranks: about 77 ms
for one all-gather), and so it does in practice: NCCL runs PAT only where each rank has a node of its own.

NVLS and SHARP, which reduce inside the switch, are left out.
Source: the tuning tables and formulas of NCCL (src/graph/tuning.cc, 2.23 to 2.30).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphshard.cost.rates import KINDS, CollectiveKind, Hardware, Protocol
from graphshard.cost.topology import GroupShape

_TREE_SHARE = 0.92
_PAT_SHARE, _PAT_BASE_US, _PAT_RANK_US, _PAT_SPEEDUP = 0.75, 8.0, 2.8, 3.5


def collective_us(hardware: Hardware, kind: CollectiveKind, num_bytes: int, group: GroupShape) -> float:
    """Microseconds of one collective: 0.0 for one rank, else above 0 whatever its size.

    Args:
        hardware: that it runs on.
        kind: of collective.
        num_bytes: of the full tensor: what an all-gather yields, a reduce-scatter or an all-to-all takes, an all-reduce
            reduces, a broadcast sends.
        group: shape of its process group.

    Raises:
        ValueError: if `kind` is unknown or `num_bytes` negative.
    """
    if num_bytes < 0:
        raise ValueError(f"collective_us: num_bytes: got {num_bytes}, want at least 0")
    return min(alpha + num_bytes * us_per_byte for alpha, us_per_byte in _choices(hardware, kind, group))


def collective_alpha_beta(hardware: Hardware, kind: CollectiveKind, group: GroupShape) -> tuple[float, float]:
    """The least latency in microseconds, and the least microseconds per byte of the full tensor.

    Both are lower bounds, of different protocols where there are several: `alpha + num_bytes * beta` is never above
    `collective_us`. What two collectives lose by not being one is a difference of `collective_us`, not alpha.

    Raises:
        ValueError: if `kind` is unknown.
    """
    choices = list(_choices(hardware, kind, group))
    return min(alpha for alpha, _ in choices), min(us_per_byte for _, us_per_byte in choices)


def collective_rates(hardware: Hardware, kind: CollectiveKind, group: GroupShape) -> tuple[tuple[float, float], ...]:
    """(Alpha, microseconds per byte) of every algorithm and protocol that is the fastest for some size."""
    best: list[tuple[float, float]] = []
    for alpha_us, us_per_byte in sorted(set(_choices(hardware, kind, group))):
        if not best or us_per_byte < best[-1][1]:
            best.append((alpha_us, us_per_byte))
    return tuple(best)


def bus_gb_s(hardware: Hardware, group: GroupShape) -> float:
    """Bandwidth of a ring through all ranks of a group."""
    if group.nodes == 1:
        return hardware.link_gb_s
    return min(hardware.link_gb_s, group.ranks_per_node * hardware.nic_gb_s, hardware.network_gb_s)


def _choices(hardware: Hardware, kind: CollectiveKind, group: GroupShape) -> Iterator[tuple[float, float]]:
    """(Alpha, microseconds per byte) of every algorithm and protocol that can run."""
    if kind not in KINDS:
        raise ValueError(f"collective: kind: got {kind!r}, want one of {', '.join(KINDS)}")
    if group.ranks == 1:
        yield 0.0, 0.0
        return
    # 1 GB/s is 1e3 bytes per microsecond.
    bytes_per_us = 1e3 * bus_gb_s(hardware, group) * hardware.kind_share.get(kind, 1.0)
    if kind == "all_to_all" and group.nodes > 1:  # no ring: what leaves a node leaves through each rank's own NIC
        bytes_per_us = min(bytes_per_us, 1e3 * hardware.nic_gb_s * group.nodes / (group.nodes - 1))
    moved = (group.ranks - 1) / group.ranks
    for protocol in hardware.protocols:
        share = protocol.link_share if group.nodes == 1 else protocol.network_share
        if not share:
            continue
        steps_us = (group.ranks - group.nodes) * protocol.step_us + (group.nodes - 1) * protocol.network_step_us
        if kind == "all_reduce":
            yield protocol.base_us + 2 * steps_us, 2 * moved / (bytes_per_us * share)
            if "tree" in hardware.algorithms:
                yield _tree_alpha_us(protocol, group), 2 / (bytes_per_us * share * _TREE_SHARE)
        elif kind == "broadcast":
            yield protocol.base_us + steps_us, 1 / (bytes_per_us * share)
        else:
            yield protocol.base_us + steps_us, moved / (bytes_per_us * share)
    if "pat" in hardware.algorithms and kind in ("all_gather", "reduce_scatter") and group.nodes == group.ranks:
        step_us = hardware.protocols[-1].network_step_us / _PAT_SPEEDUP
        alpha_us = _PAT_BASE_US + math.log2(group.nodes) * step_us + group.ranks * _PAT_RANK_US
        yield alpha_us, moved / (bytes_per_us * _PAT_SHARE)


def _tree_alpha_us(protocol: Protocol, group: GroupShape) -> float:
    inside = (group.ranks_per_node - 1) * protocol.step_us
    return protocol.base_us + 2 * (inside + math.log2(group.nodes) * protocol.network_step_us)
