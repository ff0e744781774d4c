"""What is claimed of the first step, checked on rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.compile.rows import PEER_BACKEND, CompileRow, GrowthRow, growth_rows
from bench.harness.claims import Claim

# Of the first step of FSDP2 with compiled blocks, as deep.
MAX_RATIO = 1.25
# Of everything but traces, from `rows.FROM_BLOCKS` to this depth.
MAX_GROWTH, DEEP_BLOCKS = 1.3, 96
MAX_TRACE_MS_PER_BLOCK = 60
MAX_WARM = 0.25
MAX_OWN_SHARE = 0.05
# Passes' seconds that grow as blocks ** exponent: 1 is linear, 2 quadratic; the rest is room for noise.
MAX_EXPONENT = 1.2
# Of the whole step, where equal blocks are regions of their own.
MAX_UNIT_GROWTH = 1.5


def check_claims(rows: Sequence[CompileRow]) -> list[Claim]:
    """Checks the claims on systems of graphshard; a claim of what was not measured neither holds nor fails."""
    growth = {(row.backend, row.label): row for row in growth_rows(rows)}
    systems: dict[tuple[str, str], list[CompileRow]] = {}
    for row in rows:
        if row.plan is not None:
            systems.setdefault((row.backend, row.label), []).append(row)
    claims = []
    for (backend, label), own in systems.items():
        cold = [row for row in own if row.cache == "cold"]
        shares = f"{label}: passes and planner <= {MAX_OWN_SHARE} of a cold step"
        if backend == PEER_BACKEND:
            claims += [
                _worst(f"{label}: cold first step <= {MAX_RATIO} x fsdp2+compile's", cold, "ratio", MAX_RATIO),
                *_growth_claims(backend, label, growth.get((backend, label))),
                _worst(f"{label}: warm first step <= {MAX_WARM} x cold", own, "to_cold", MAX_WARM),
            ]
        claims += [
            _worst(shares, cold, "own_share", MAX_OWN_SHARE),
            _linear_claim(backend, label, growth.get((backend, label))),
        ]
        if own[0].regions == "unit":
            claims.append(_constant_claim(backend, label, growth.get((backend, label))))
    return claims


def _worst(says: str, rows: Sequence[CompileRow], name: str, most: float) -> Claim:
    backend = rows[0].backend if rows else PEER_BACKEND
    found = [(value, row.blocks) for row in rows if (value := getattr(row, name)) is not None]
    if not found:
        return Claim(backend, says, "-", None)
    worst, blocks = max(found)
    return Claim(backend, says, f"{worst:.3f} ({blocks} blocks)", worst <= most)


def _linear_claim(backend: str, label: str, growth: GrowthRow | None) -> Claim:
    says = f"{label}: passes' seconds growing linearly, as blocks ** n with n <= {MAX_EXPONENT}"
    if growth is None or growth.passes_exponent is None:
        return Claim(backend, says, "-", None)
    return Claim(backend, says, f"n = {growth.passes_exponent:.2f}", growth.passes_exponent <= MAX_EXPONENT)


def _constant_claim(backend: str, label: str, growth: GrowthRow | None) -> Claim:
    says = f"{label}: first step nearly constant in depth, <= {MAX_UNIT_GROWTH} x"
    if growth is None:
        return Claim(backend, says, "-", None)
    got = f"{growth.whole:.2f} ({growth.from_blocks} -> {growth.to_blocks} blocks)"
    return Claim(backend, says, got, growth.whole <= MAX_UNIT_GROWTH)


def _growth_claims(backend: str, label: str, growth: GrowthRow | None) -> list[Claim]:
    others = f"{label}: {DEEP_BLOCKS} blocks <= {MAX_GROWTH} x of fewer, in all but traces"
    traces = f"{label}: traces of Dynamo and AOTAutograd <= {MAX_TRACE_MS_PER_BLOCK} ms a block"
    if growth is None:
        return [Claim(backend, says, "-", None) for says in (others, traces)]
    got = f"{growth.others:.2f} ({growth.from_blocks} -> {growth.to_blocks} blocks)"
    trace_ms = 1e3 * growth.traces_s_per_block
    return [
        Claim(backend, others, got, growth.others <= MAX_GROWTH if growth.to_blocks == DEEP_BLOCKS else None),
        Claim(backend, traces, f"{trace_ms:.0f} ms", trace_ms <= MAX_TRACE_MS_PER_BLOCK),
    ]
