"""Times, bytes and FQNs, written for people."""

from __future__ import annotations

from collections.abc import Sequence

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_us(us: float) -> str:
    """``12.5 us``, ``1.250 ms``, ``2.500 s``: four digits, or one behind the point below 1 ms."""
    if round(us, 1) < 1000.0:
        return f"{us:.1f} us"
    if float(_four_digits(us / 1e3)) < 1000.0:
        return f"{_four_digits(us / 1e3)} ms"
    return f"{_four_digits(us / 1e6)} s"


def format_bytes(num_bytes: int) -> str:
    """``512 B``, ``1.5 KiB``, ``64.0 MiB``, ``21.33 GiB``."""
    if num_bytes < KIB:
        return f"{num_bytes} B"
    if round(num_bytes / KIB, 1) < 1024.0:
        return f"{num_bytes / KIB:.1f} KiB"
    if round(num_bytes / MIB, 1) < 1024.0:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def format_share(part: float, whole: float) -> str:
    """``12.3 %``; a dash where there is no whole."""
    return f"{100.0 * part / whole:.1f} %" if whole else "-"


def format_ratio(us: float, than_us: float) -> str:
    """``1.04x``, three digits behind the point below 1.1; a dash where there is nothing to compare with."""
    if not than_us:
        return "-"
    ratio = us / than_us
    return f"{ratio:.3f}x" if ratio < 1.1 else f"{ratio:.2f}x"


def format_fqns(fqns: Sequence[str]) -> str:
    """First and last, what they share once: ``layers.0.{wq.weight ... w2.weight}``."""
    if len(fqns) == 1:
        return fqns[0]
    first, last = fqns[0].split("."), fqns[-1].split(".")
    shared = 0
    while shared < min(len(first), len(last)) - 1 and first[shared] == last[shared]:
        shared += 1
    between = ", " if len(fqns) == 2 else " ... "
    ends = f"{'.'.join(first[shared:])}{between}{'.'.join(last[shared:])}"
    return f"{'.'.join(first[:shared])}.{{{ends}}}" if shared else ends


def _four_digits(value: float) -> str:
    for digits in (3, 2):
        written = f"{value:.{digits}f}"
        if len(written) <= 5:
            return written
    return f"{value:.1f}"
