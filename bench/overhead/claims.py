"""What is claimed of compile time and of agreement, checked on rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.claims import Claim
from bench.overhead.rows import AgreementRow, CompileRow, growth_rows
from bench.overhead.samples import STEADY_STEPS

MAX_SHARE = 0.05
# Seconds that grow as layers ** exponent: 1 is linear, 2 quadratic; the rest is room for noise.
MAX_EXPONENT = 1.2
# From the fewest to the most layers.
MAX_UNIT_GROWTH = 1.5
MAX_AGREEMENT_MS = 50


def check_claims(rows: Sequence[CompileRow], whole: str, by_unit: str) -> list[Claim]:
    """Checks the claims on compile time, by backend.

    Args:
        rows: all cases; at least two depths of each variant.
        whole: variant that compiles the model as one region.
        by_unit: variant with a region per unit.
    """
    checked = []
    for backend in dict.fromkeys(row.backend for row in rows):
        cases = sorted((row for row in rows if row.backend == backend), key=lambda row: row.num_layers)
        checked += [_share_claim([row for row in cases if row.variant == variant]) for variant in (whole, by_unit)]
        exponents = [
            row.passes_exponent
            for row in growth_rows([row for row in cases if row.variant == whole])
            if row.passes_exponent is not None
        ]
        linear = f"{whole}: passes' seconds growing linearly, as layers ** n with n <= {MAX_EXPONENT}"
        checked.append(Claim(backend, linear, f"n = {max(exponents):.2f}", max(exponents) <= MAX_EXPONENT))
        units = [row for row in cases if row.variant == by_unit]
        growth = units[-1].first_step_s / units[0].first_step_s
        depths = f"{units[0].num_layers} to {units[-1].num_layers} layers"
        constant = f"{by_unit}: first step nearly constant in depth, {depths} <= {MAX_UNIT_GROWTH} x"
        checked.append(Claim(backend, constant, f"{growth:.2f} x", growth <= MAX_UNIT_GROWTH))
    return checked


def check_agreement(row: AgreementRow) -> list[Claim]:
    """Checks the claims on what ranks ask each other."""
    program, entry = row.program_ms[1], row.entry_ms[1]
    return [
        Claim("", f"agreement on a program <= {MAX_AGREEMENT_MS} ms", _ms(row.program_ms), program <= MAX_AGREEMENT_MS),
        Claim(
            "", f"election of an entry's leader <= {MAX_AGREEMENT_MS} ms", _ms(row.entry_ms), entry <= MAX_AGREEMENT_MS
        ),
        Claim("", f"questions to the store in {STEADY_STEPS} steps: none", str(row.operations), row.operations == 0),
    ]


def _ms(found: tuple[float, float]) -> str:
    return f"{found[0]:.1f}, at most {found[1]:.1f} ms"


def _share_claim(cases: Sequence[CompileRow]) -> Claim:
    share, row = max(((row.share or 0.0, row) for row in cases), key=lambda pair: pair[0])
    says = f"{row.variant}: passes' share of the first step <= {MAX_SHARE:.0%}"
    return Claim(row.backend, says, f"{share:.1%} ({row.num_layers} layers)", share <= MAX_SHARE)
