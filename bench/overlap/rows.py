"""Rows of `bench.overlap`, as text, and what is claimed of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.harness.claims import Claim
from bench.harness.tables import align

# Of the step; more where no schedule can hide it.
MOST_EXPOSED = 0.05
# To the best peer.
MOST_STEP_RATIO = 0.97
# Of the measured forward and backward.
MOST_ERROR = 0.10
# Losses of the first steps differ by the order of sums in bf16.
LOSS_TOLERANCE = 2e-2


@dataclass(frozen=True)
class PretendedNetwork:
    """A network of `ranks` equal ranks, each collective `alpha_us` and its bytes at `gb_s` long."""

    ranks: int
    alpha_us: float
    gb_s: float

    @staticmethod
    def parse(text: str) -> PretendedNetwork:
        """Of ``RANKS:US:GB/S``, such as ``8:32:361``.

        Raises:
            argparse.ArgumentTypeError: it is no such text.
        """
        try:
            ranks, alpha_us, gb_s = text.split(":")
            found = PretendedNetwork(int(ranks), float(alpha_us), float(gb_s))
        except ValueError:
            found = PretendedNetwork(0, 0.0, 0.0)
        if found.ranks < 2 or not found.alpha_us >= 0.0 or not found.gb_s > 0.0:
            want = "RANKS:US:GB/S, such as 8:32:361: at least 2 ranks, a latency, a bandwidth above 0"
            raise argparse.ArgumentTypeError(f"got {text!r}, want {want}")
        return found

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, {self.alpha_us:g} us, {self.gb_s:g} GB/s"

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return f"{self.ranks}:{self.alpha_us:g}:{self.gb_s:g}"


@dataclass(frozen=True)
class OverlapPrediction:
    """What the simulator says of forward and backward, in microseconds.

    Attributes:
        lower_bound_us: no schedule takes less.
        compute_us: of the computation alone.
    """

    step_us: float
    exposed_us: float
    lower_bound_us: float
    compute_us: float

    @property
    def least_exposed(self) -> float:
        """The part of the step that no schedule can hide."""
        return max(0.0, self.lower_bound_us - self.compute_us) / self.lower_bound_us


@dataclass(frozen=True)
class OverlapRun:
    """One system on one network.

    Attributes:
        step_us: median of a step: forward, backward, AdamW, gradients set to None.
        passes_us: of its forward and backward.
        exposed_us: of a step, in which only the network was busy; on the CPU, in which a wait stood still; None: the
            profiler saw no kernels.
        communicating_us: in which the network was busy, None likewise.
        peak_bytes: most that was allocated in a step; None: not known.
        first_step_s: seconds of the first step, compilation included.
        losses: of the first steps.
        launches: collectives of a step.
        prediction: of graphshard's simulator.
    """

    step_us: float
    passes_us: float
    exposed_us: float | None
    communicating_us: float | None
    peak_bytes: int | None
    first_step_s: float
    losses: tuple[float, ...]
    launches: int
    prediction: OverlapPrediction | None = None

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Of JSON."""
        prediction = fields.pop("prediction")
        losses = tuple(fields.pop("losses"))
        return cls(**fields, losses=losses, prediction=None if prediction is None else OverlapPrediction(**prediction))


@dataclass(frozen=True)
class OverlapRow:
    """A run, or why there is none."""

    system: str
    network: PretendedNetwork
    run: OverlapRun | None
    why_not: str = ""


def check_losses(rows: Sequence[OverlapRow]) -> list[str]:
    """Where a system computes something else than the first one that ran on the network: a line each."""
    wrong = []
    first: dict[PretendedNetwork, OverlapRow] = {}
    for row in rows:
        if row.run is None:
            continue
        want = first.setdefault(row.network, row).run
        assert want is not None
        for step, (mine, its) in enumerate(zip(row.run.losses, want.losses, strict=True)):
            if not abs(mine - its) <= LOSS_TOLERANCE * abs(its):
                wrong.append(
                    f"{row.system}, {row.network.name}: loss of step {step}: got {mine:g}, want {its:g} as "
                    f"{first[row.network].system}"
                )
                break
    return wrong


def overlap_table(rows: Sequence[OverlapRow], peers: Sequence[str]) -> list[str]:
    """One row for each system and network."""
    header = ("network", "system", "step ms", "/ peer", "fwd+bwd ms", "predicted", "exposed ms", "share", "bound")
    header += ("predicted", "peak GiB", "collectives", "first s")
    return align(header, [_cells(row, _best_us(rows, row.network, peers)) for row in rows])


def _cells(row: OverlapRow, best_us: float | None) -> tuple[str, ...]:
    run = row.run
    if run is None:
        return (row.network.name, row.system, *["-"] * 11)
    said = run.prediction
    return (
        row.network.name,
        row.system,
        f"{run.step_us / 1e3:,.2f}",
        "-" if best_us is None else f"{run.step_us / best_us:.3f}",
        f"{run.passes_us / 1e3:,.2f}",
        "-" if said is None else f"{said.step_us / 1e3:,.2f}",
        "-" if run.exposed_us is None else f"{run.exposed_us / 1e3:,.2f}",
        "-" if run.exposed_us is None else f"{run.exposed_us / run.step_us:.1%}",
        "-" if said is None else f"{said.least_exposed:.1%}",
        "-" if said is None else f"{said.exposed_us / 1e3:,.2f}",
        "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.2f}",
        str(run.launches),
        f"{run.first_step_s:.1f}",
    )


def _best_us(rows: Sequence[OverlapRow], network: PretendedNetwork, peers: Sequence[str]) -> float | None:
    times = [row.run.step_us for row in rows if row.run and row.network == network and row.system in peers]
    return min(times, default=None)


def overlap_claims(
    rows: Sequence[OverlapRow], peers: Sequence[str], ours: str, reference: str, measured: bool
) -> list[Claim]:
    """Checks what is claimed, on each network.

    Args:
        rows: all of them.
        peers: systems that the step is compared with.
        ours: the system that the claims are of.
        reference: the one whose memory is the bound.
        measured: on a GPU, in full.
    """
    found = []
    for network in dict.fromkeys(row.network for row in rows):
        runs = {row.system: row.run for row in rows if row.network == network and row.run is not None}
        run, eager = runs.get(ours), runs.get(reference)
        best_us = _best_us(rows, network, peers)
        for says, got, holds in _checks(run, eager, best_us):
            there = measured and got
            found.append(Claim(network.name, says, got if there else "not measured", holds if there else None))
    return found


def _checks(
    run: OverlapRun | None, eager: OverlapRun | None, best_us: float | None
) -> list[tuple[str, str, bool | None]]:
    none: tuple[str, bool | None] = ("", None)
    step = exposed = error = peak = none
    if run is not None and run.prediction is not None:
        if run.exposed_us is not None:
            share, bound = run.exposed_us / run.step_us, run.prediction.least_exposed
            exposed = (f"{share:.1%}, bound {bound:.1%}", share <= max(MOST_EXPOSED, bound))
        off = run.prediction.step_us / run.passes_us - 1.0
        error = (f"{off:+.1%}", abs(off) <= MOST_ERROR)
        if best_us is not None:
            step = (f"{run.step_us / best_us:.3f}", run.step_us <= MOST_STEP_RATIO * best_us)
        if eager is not None and run.peak_bytes is not None and eager.peak_bytes is not None:
            peak = (f"{run.peak_bytes / eager.peak_bytes:.3f}", run.peak_bytes <= eager.peak_bytes)
    return [
        (f"step: at most {MOST_STEP_RATIO} of the best peer", *step),
        (f"exposed: at most {MOST_EXPOSED:.0%} of the step, or what no schedule can hide", *exposed),
        (f"predicted forward and backward: within {MOST_ERROR:.0%}", *error),
        ("peak memory: not above eager FSDP2", *peak),
    ]
