"""Rows of `bench.copies`, as text, and what is claimed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness.claims import Claim
from bench.harness.tables import align

MIB = 2**20
# Of the flat buffer. Below it, a launch takes as long as the copy.
LEAST_CLAIMED_BYTES = 32 * MIB
LEAST_SHARE = 0.90
# Of the peer's time; two runs of one kernel differ by as much.
NOISE = 1.02


@dataclass(frozen=True)
class PeerTime:
    """A peer on one row.

    Attributes:
        us: median.
        ratio: graphshard's time to it.
        with_host: the device waited for the host: the time says nothing of the copy.
    """

    name: str
    us: float
    ratio: float
    with_host: bool = False


@dataclass(frozen=True)
class CopyRow:
    """One copy of one bucket.

    Attributes:
        case: form of the copy.
        tensors: parameters in the bucket.
        flat_bytes: of the flat buffer.
        moved_bytes: read and written at least.
        us, low_us, high_us: median and quartiles of graphshard's operator; None: it was not timed.
        copy_us: median of a plain `Tensor.copy_` that reads and writes as many bytes.
        with_host: the device waited for the host in graphshard's samples.
        peers: their times.
        differing: peers that give other bits.
        left_out: peers that failed, with the reason.
    """

    case: str
    tensors: int
    flat_bytes: int
    moved_bytes: int
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    copy_us: float | None = None
    with_host: bool = False
    peers: tuple[PeerTime, ...] = ()
    differing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.case}, {self.flat_bytes / MIB:,.2f} MiB"

    @property
    def gb_per_s(self) -> float | None:
        return None if self.us is None else self.moved_bytes / self.us / 1e3

    @property
    def share(self) -> float | None:
        """Of the bandwidth of `Tensor.copy_`."""
        return None if self.us is None or self.copy_us is None else self.copy_us / self.us

    @property
    def best(self) -> PeerTime | None:
        """The fastest peer, of those that did not wait for the host."""
        return min((peer for peer in self.peers if not peer.with_host), key=lambda peer: peer.us, default=None)

    @property
    def claimed(self) -> bool:
        return self.flat_bytes >= LEAST_CLAIMED_BYTES and self.us is not None


@dataclass(frozen=True)
class HostRow:
    """What one call takes the host, on one row's bucket.

    Attributes:
        us: median.
        ratio: graphshard's time to it; 1 for graphshard's own.
    """

    case: str
    name: str
    tensors: int
    us: float
    ratio: float


def copy_table(rows: Sequence[CopyRow]) -> list[str]:
    """graphshard's operator, row by row, beside the best peer."""
    header = (
        "case",
        "best of torch",
        "flat MiB",
        "tensors",
        "moved MiB",
        "us",
        "quartiles us",
        "GB/s",
        "of copy_",
        "/ best",
    )
    return align(header, [_cells(row) for row in rows])


def _cells(row: CopyRow) -> tuple[str, ...]:
    sizes = (f"{row.flat_bytes / MIB:,.2f}", str(row.tensors), f"{row.moved_bytes / MIB:,.2f}")
    best = row.best
    if row.us is None or row.low_us is None or row.high_us is None or row.gb_per_s is None or row.share is None:
        return (row.case, f"OTHER BITS: {'; '.join(row.differing)}", *sizes, *["-"] * 5)
    return (
        row.case,
        "-" if best is None else best.name,
        *sizes,
        f"{row.us:,.1f}{_mark(row.with_host)}",
        f"{row.low_us:,.1f} - {row.high_us:,.1f}",
        f"{row.gb_per_s:,.0f}",
        f"{row.share:.1%}",
        "-" if best is None else f"{best.ratio:.3f}",
    )


def peer_table(rows: Sequence[CopyRow]) -> list[str]:
    """Every peer on every row."""
    cells = [
        (
            row.case,
            peer.name,
            f"{row.flat_bytes / MIB:,.2f}",
            f"{peer.us:,.1f}{_mark(peer.with_host)}",
            f"{peer.ratio:.3f}",
        )
        for row in rows
        for peer in row.peers
    ]
    return align(("case", "peer", "flat MiB", "us", "graphshard / peer"), cells)


def _mark(with_host: bool) -> str:
    return "*" if with_host else ""


def host_table(rows: Sequence[HostRow]) -> list[str]:
    """What a call takes the host."""
    cells = [(row.case, row.name, str(row.tensors), f"{row.us:,.1f}", f"{row.ratio:.2f}") for row in rows]
    return align(("case", "call", "tensors", "host us", "graphshard / it"), cells)


def note_lines(rows: Sequence[CopyRow]) -> list[str]:
    """What the tables do not say of themselves."""
    left_out = dict.fromkeys(f"{row.name}: {why}" for row in rows for why in row.left_out)
    marked = any(row.with_host or any(peer.with_host for peer in row.peers) for row in rows)
    return [
        *(f"NOTE: left out: {line}" for line in left_out),
        *(["* the device waited for the host: such a peer is not compared"] if marked else []),
    ]


def copy_claims(rows: Sequence[CopyRow], measured: bool) -> list[Claim]:
    """Checks what is claimed of copies.

    Args:
        rows: all of them.
        measured: on a GPU, in full: else only bits are claimed.
    """
    claimed = [row for row in rows if row.claimed] if measured else []
    same = sum(not row.differing for row in rows)
    bits = Claim("torch", "all peers give graphshard's bits", f"{same} of {len(rows)} rows", same == len(rows))
    size = f"{LEAST_CLAIMED_BYTES // MIB} MiB and more"
    shares = [(row, row.share) for row in claimed if row.share is not None]
    ratios = [(row, row.best.ratio) for row in claimed if row.best is not None]
    return [
        bits,
        _worst(
            f"copies of {size}: at least {LEAST_SHARE:.0%} of the bandwidth of copy_",
            [(row, share, share >= LEAST_SHARE) for row, share in shares],
            lambda share: f"{share:.1%}",
            min,
        ),
        _worst(
            f"copies of {size}: never slower than torch's best, ratio <= {NOISE} with noise",
            [(row, ratio, ratio <= NOISE) for row, ratio in ratios],
            lambda ratio: f"{ratio:.3f}",
            max,
        ),
    ]


def _worst(
    says: str,
    found: Sequence[tuple[CopyRow, float, bool]],
    text: Callable[[float], str],
    worst: Callable[[list[float]], float],
) -> Claim:
    if not found:
        return Claim("cuda", says, "not measured", None)
    least = worst([number for _, number, _ in found])
    row = next(row for row, number, _ in found if number == least)
    held = sum(holds for *_, holds in found)
    return Claim("cuda", says, f"{held} of {len(found)}, worst {text(least)} ({row.name})", held == len(found))
