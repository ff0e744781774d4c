"""What is claimed of the first step, checked on rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.compile.rows import CompileRow, GrowthRow, growth_rows
from bench.harness.claims import Claim

BACKEND = "inductor"
# Of the first step of FSDP2 with compiled blocks, as deep.
MAX_RATIO = 1.25
# Of everything but traces, from `rows.FROM_BLOCKS` to this depth.
MAX_GROWTH, DEEP_BLOCKS = 1.3, 96
MAX_TRACE_MS_PER_BLOCK = 60
MAX_WARM = 0.25
MAX_OWN_SHARE = 0.05


def check_claims(rows: Sequence[CompileRow], labels: Sequence[str]) -> list[Claim]:
    """Checks the claims on systems of graphshard; a claim of what was not measured neither holds nor fails.

    Args:
        rows: of all cases.
        labels: of the systems.
    """
    growth = {row.label: row for row in growth_rows(rows)}
    claims = []
    for label in labels:
        own = [row for row in rows if row.label == label]
        cold = [row for row in own if row.cache == "cold"]
        claims += [
            _worst(f"{label}: cold first step <= {MAX_RATIO} x fsdp2+compile's", cold, "ratio", MAX_RATIO),
            *_growth_claims(label, growth.get(label)),
            _worst(f"{label}: warm first step <= {MAX_WARM} x cold", own, "to_cold", MAX_WARM),
            _worst(f"{label}: passes and planner <= {MAX_OWN_SHARE} of a cold step", cold, "own_share", MAX_OWN_SHARE),
        ]
    return claims


def _worst(says: str, rows: Sequence[CompileRow], name: str, most: float) -> Claim:
    found = [(value, row.blocks) for row in rows if (value := getattr(row, name)) is not None]
    if not found:
        return Claim(BACKEND, says, "-", None)
    worst, blocks = max(found)
    return Claim(BACKEND, says, f"{worst:.3f} ({blocks} blocks)", worst <= most)


def _growth_claims(label: str, growth: GrowthRow | None) -> list[Claim]:
    others = f"{label}: {DEEP_BLOCKS} blocks <= {MAX_GROWTH} x of fewer, in all but traces"
    traces = f"{label}: traces of Dynamo and AOTAutograd <= {MAX_TRACE_MS_PER_BLOCK} ms a block"
    if growth is None:
        return [Claim(BACKEND, says, "-", None) for says in (others, traces)]
    got = f"{growth.others:.2f} ({growth.from_blocks} -> {growth.to_blocks} blocks)"
    trace_ms = 1e3 * growth.traces_s_per_block
    return [
        Claim(BACKEND, others, got, growth.others <= MAX_GROWTH if growth.to_blocks == DEEP_BLOCKS else None),
        Claim(BACKEND, traces, f"{trace_ms:.0f} ms", trace_ms <= MAX_TRACE_MS_PER_BLOCK),
    ]
