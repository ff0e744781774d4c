"""What is claimed of agreement, checked on rows."""

from __future__ import annotations

from bench.harness.claims import Claim
from bench.overhead.rows import AgreementRow
from bench.overhead.samples import STEADY_STEPS

MAX_AGREEMENT_MS = 50


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
