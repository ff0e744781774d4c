"""Rows of `bench.step`, and whether the systems trained the same. No process, no clock: tested without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.systems import PEERS, REPLICATING, System
from bench.step.samples import FirstSteps, TrainingTurn

# Most that a step may take, as a share of the better peer's: of graphshard with Inductor, by plan and model.
TARGETS: dict[str, dict[str, float]] = {
    "fsdp2": {"d128_L12": 0.80, "d256_L6": 0.90, "d512_L6": 0.95, "demo": 0.90},
    "auto": {"d128_L12": 0.60, "d256_L6": 0.80, "d512_L6": 0.88, "demo": 0.85},
}
# Relative, of the first step's loss and of the norm of each parameter's gradient. All systems begin with the same
# parameters and read the same text: float32 sums in another order (ulp 1.2e-7), nothing more. A gradient that is
# dropped, doubled or another rank's is off by much more.
FIRST_TOLERANCE = 1e-4
# Relative, of the loss behind the first turn: AdamW divides by the gradient's own size, so that rounding moves some
# elements as far as a gradient would, and it adds up, to 6e-3 in 40 steps. A matrix that is not updated, or read as it
# was, moves this loss by 1e-3.
LATER_TOLERANCE = 1e-4
# Between the quartiles, as a share of the median: above it, something else ran.
MAX_SPREAD = 0.1


@dataclass(frozen=True)
class TrainingRow:
    """Training steps of one system; the keys of the JSON file are these names.

    Attributes:
        backend: ``"eager"`` where nothing is compiled.
        plan: graphshard's; None for other systems.
        step_ms: median; a step takes as long as it does on the slower rank.
        peak_rss_bytes: most that was resident on one rank during the steps.
        compile_s: seconds of the first step, compilation included.
        runs: how many steps were timed.
        low_ms: lower quartile.
        high_ms: upper quartile.
        ratio: of `step_ms` to that of the faster peer; None if no peer was measured.
        ahead_from: the step from which on all steps together, the first one too, have taken no longer than those of any
            peer; None if no peer was measured, or never.
    """

    model: str
    system: str
    backend: str
    plan: str | None
    step_ms: float
    peak_rss_bytes: int
    compile_s: float
    runs: int
    low_ms: float
    high_ms: float
    ratio: float | None
    ahead_from: int | None

    @property
    def target(self) -> float | None:
        """For `ratio`."""
        if self.plan is None or self.backend != "inductor":
            return None
        return TARGETS.get(self.plan, {}).get(self.model)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none, or no ratio."""
        return None if self.ratio is None or self.target is None else self.ratio <= self.target

    @property
    def disturbed(self) -> bool:
        """Whether the steps differ too much."""
        return self.high_ms - self.low_ms > MAX_SPREAD * self.step_ms


@dataclass(frozen=True)
class CheckRow:
    """What one system computed and launched; beside each `TrainingRow`.

    Attributes:
        first_loss: of the first step, mean over ranks.
        grad_difference: largest relative difference, over parameters, of the norm of a gradient in the first step from
            that of the first system.
        worst_grad: FQN of that parameter.
        later_loss: of the last step of the first turn, mean over ranks.
        all_gathers: launched in one step; so are the other two.
        idle_rss_bytes: resident between steps, on the rank with most.
        peak_is_of_steps: False where the peak is that since the process began, compilation included.
    """

    model: str
    system: str
    backend: str
    plan: str | None
    first_loss: float
    grad_difference: float
    worst_grad: str
    later_loss: float
    all_gathers: int
    reduce_scatters: int
    all_reduces: int
    idle_rss_bytes: int
    peak_is_of_steps: bool


def training_rows(
    model: str, first: Mapping[System, Sequence[FirstSteps]], turns: Mapping[System, Sequence[Sequence[TrainingTurn]]]
) -> list[TrainingRow]:
    """One row for each system, in order.

    Args:
        model: its name.
        first: by rank.
        turns: in order; each by rank.
    """
    steps_ms = {
        system: [1e3 * max(on_ranks) for turn in done for on_ranks in zip(*(t.steps_s for t in turn), strict=True)]
        for system, done in turns.items()
    }
    medians_ms = {system: statistics.median(times) for system, times in steps_ms.items()}
    first_ms = {system: 1e3 * max(on_rank.first_step_s for on_rank in first[system]) for system in turns}
    peers = [system for system in turns if system.name in PEERS]
    peers_ms = [medians_ms[peer] for peer in peers]
    rows = []
    for system, times in steps_ms.items():
        low_ms, _, high_ms = statistics.quantiles(times, n=4, method="inclusive")
        mine = first_ms[system], medians_ms[system]
        ahead = [_ahead_from(mine, (first_ms[peer], medians_ms[peer])) for peer in peers]
        rows.append(
            TrainingRow(
                model,
                system.name,
                system.backend,
                system.plan,
                medians_ms[system],
                max(t.peak_rss_bytes for turn in turns[system] for t in turn),
                first_ms[system] / 1e3,
                len(times),
                low_ms,
                high_ms,
                medians_ms[system] / min(peers_ms) if peers_ms else None,
                int(found) if math.isfinite(found := max(ahead, default=math.inf)) else None,
            )
        )
    return rows


def _ahead_from(mine: tuple[float, float], peer: tuple[float, float]) -> float:
    """The number of steps, at least 1, that take no longer than a peer's; infinite: never. Each is the time of the
    first step and that of a later one.
    """
    (first, later), (peers_first, peers_later) = mine, peer
    if first <= peers_first:
        return 1.0 if later <= peers_later else math.inf
    if later >= peers_later:
        return math.inf
    return 1.0 + math.ceil((first - peers_first) / (peers_later - later))


def check_row(
    model: str,
    system: System,
    first: Sequence[FirstSteps],
    turns: Sequence[Sequence[TrainingTurn]],
    want_norms: Mapping[str, float],
) -> CheckRow:
    """The row of one system, measured on each rank.

    Args:
        model: its name.
        system: that trained.
        first: by rank.
        turns: in order; each by rank.
        want_norms: what the first system has as `grad_norms`.
    """
    launches = first[0].launches
    got_norms = first[0].grad_norms
    differences = {
        name: _difference(got_norms.get(name, math.nan), want_norms.get(name, math.nan))
        for name in {**want_norms, **got_norms}
    }
    worst_grad = max(differences, key=lambda name: differences[name])
    return CheckRow(
        model,
        system.name,
        system.backend,
        system.plan,
        statistics.fmean(f.loss for f in first),
        differences[worst_grad],
        worst_grad,
        statistics.fmean(t.loss for t in turns[0]),
        launches["all_gather"],
        launches["reduce_scatter"],
        launches["all_reduce"],
        max(t.idle_rss_bytes for turn in turns for t in turn),
        all(t.peak_is_of_turn for turn in turns for t in turn),
    )


def check_training(rows: Sequence[CheckRow]) -> None:
    """Checks that all systems trained one model alike, over all ranks.

    Raises:
        RuntimeError: naming the first that did not.
    """
    want = rows[0]
    for row in rows:
        title = f"bench: {row.model}, {row.system}, {row.backend}, plan {row.plan}"
        if row.system in REPLICATING:
            if not row.all_reduces:
                raise RuntimeError(f"{title}: got no all-reduce in a step, want gradients reduced")
        elif not (row.all_gathers and row.reduce_scatters):
            raise RuntimeError(
                f"{title}: got {row.all_gathers} all-gathers and {row.reduce_scatters} reduce-scatters in a step, "
                "want parameters gathered and gradients reduced"
            )
        for name, tolerance in (("first_loss", FIRST_TOLERANCE), ("later_loss", LATER_TOLERANCE)):
            values = getattr(row, name), getattr(want, name)
            if not _difference(*values) <= tolerance:
                raise RuntimeError(
                    f"{title}: {name}: got {values[0]}, want that of {want.system}, {values[1]}, "
                    f"within {tolerance:.0e}, relative"
                )
        if not row.grad_difference <= FIRST_TOLERANCE:
            raise RuntimeError(
                f"{title}: gradient of {row.worst_grad}: its norm is off by {row.grad_difference:.1e}, want that of "
                f"{want.system} within {FIRST_TOLERANCE:.0e}, relative"
            )


def _difference(got: float, want: float) -> float:
    """Relative; infinite where a number is missing."""
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return 0.0 if got == want else abs(got - want) / max(abs(got), abs(want))
