"""Local search over bucket boundaries: each trial schedules one candidate, and the best one is varied further.

First buckets of a size each, of gathers and of reductions in turn; then boundaries between buckets are put in and taken
out: those at the same place of equal units all at once, then those near the ends of the program one by one. In between,
the priorities of the list scheduler are tuned.

Source: local search over partitions, as in iterated list scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.planner.blocks import RepeatedBlocks, expanded, repeated_blocks, shortened
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.candidates import BucketEnds, Candidate, ScheduledCandidate
from graphshard.planner.coarse import coarsened
from graphshard.planner.first_buckets import ends_of_units, first_ends
from graphshard.planner.list_scheduling import list_schedule
from graphshard.planner.problem import Problem, Tasks
from graphshard.planner.search_space import SearchSpace

# What is tried of a candidate's priorities; of `reserve_bytes`, multiples of what a large reduction takes.
_MAX_SLACKS = (float("inf"), 4.0, 1.0)
_LOOKAHEADS = (0.0, 0.5, 1.0, 1e9)
_RESERVES = (0.0, 1.0, 2.0)
# (lookahead, wait_margin) that launch earlier and await later.
_SAFER = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5))
# So many of the best first buckets are tried with other priorities.
_KINDS = 4
# Boundaries as near to an end as this are moved by themselves before those of only a part of the program.
_NEAR = 6
# So many blocks stand for all; what is found for them is tried with these periods, in so many trials on all.
_BLOCKS = 8
_PERIODS = (1, 2, 3, 4)
_CARRIED = 20
# A problem of so few ops is searched itself.
_FINE = 200
# So many of a coarser problem are tried on the problem itself.
_COARSE = 6
# What is carried over is compared with so many units in each bucket.
_PLAIN = (1, 4, 8)
# What is found for few blocks is compared with what a coarser problem gives if it is farther than this from the bound.
_NEAR_BOUND = 1.02
# So many trials are enough to compare problems.
COMPARISON_TRIALS = 12
# What is as fast as the fastest.
_SAME = 1.001

# So few buckets are moved one by one, by so many members.
_FEW = 20
_SHIFTS = (-9, 9, -3, 3, -1, 1)


@dataclass
class Search:
    """Candidates that were tried, and what the list scheduler made of them.

    Attributes:
        space: of the problem.
        trials_left: how many candidates may still be tried.
    """

    space: SearchSpace
    trials_left: int

    def __post_init__(self) -> None:
        self.seen: dict[Candidate, ScheduledCandidate | None] = {}
        self.best: ScheduledCandidate | None = None

    def try_candidate(self, candidate: Candidate) -> bool:
        """Whether `candidate` is better than all before."""
        if candidate in self.seen or self.trials_left <= 0:
            return False
        self.trials_left -= 1
        found = self.seen[candidate] = list_schedule(self.space, candidate)
        if found is None or (self.best is not None and found.step_us >= self.best.step_us):
            return False
        self.best = found
        return True

    def safer(self, found: ScheduledCandidate) -> ScheduledCandidate:
        """`found` with launches that are earlier and waits that are later, where that costs nothing.

        What really runs differs from what is predicted.
        """
        self.trials_left += len(_SAFER)
        for lookahead, wait_margin in _SAFER:
            lookahead = max(lookahead, found.candidate.lookahead)
            candidate = replace(found.candidate, lookahead=lookahead, wait_margin=wait_margin)
            self.try_candidate(candidate)
            other = self.seen.get(candidate)
            if other is not None and other.step_us <= found.step_us and other.num_buckets <= found.num_buckets:
                return other
        return found

    def different(self, most: int) -> list[ScheduledCandidate]:
        """The fastest that differ in their buckets."""
        fastest = sorted((found for found in self.seen.values() if found), key=lambda found: found.step_us)
        by_buckets = {frozenset(bucket for _, _, bucket in found.steps): found for found in fastest[::-1]}
        return list(by_buckets.values())[::-1][:most]

    def good(self) -> list[ScheduledCandidate]:
        """Those that are as fast as the fastest, with the fewest collectives first."""
        if self.best is None:
            return []
        most_us = self.best.step_us * _SAME
        good = [found for found in self.seen.values() if found is not None and found.step_us <= most_us]
        return sorted(good, key=lambda found: (found.num_buckets, found.step_us))


def searched(problem: Problem, budget_bytes: float, trials: int = 240) -> Search:
    """What is found in `trials` trials."""
    tried: list[Search] = []
    for spare_bytes in _spares(problem):
        space = SearchSpace(problem, budget_bytes, spare_bytes)
        if not tried or (space.fits and all(space.deferred != other.space.deferred for other in tried)):
            tried.append(Search(space, trials // (1 + len(tried))))
            _try_sizes(tried[-1])
    found = [search for search in tried if search.best is not None] or tried
    best = min(found, key=lambda search: search.best.step_us if search.best is not None else 0.0)
    best.trials_left = max(best.trials_left, trials // 2)
    _move_boundaries(best)
    return best


def searched_by_blocks(problem: Problem, budget_bytes: float, trials: int = 240) -> Search:
    """The same; of a large problem, most trials are on few of the blocks that repeat, or on a coarser one."""
    if len(problem.ops) <= _FINE:
        return searched(problem, budget_bytes, trials)
    blocks = repeated_blocks(problem)
    found: Search | None = None
    if blocks is not None and blocks.count >= 2 * _BLOCKS:
        found = _by_blocks(problem, blocks, budget_bytes, trials)
    if found is None or found.best is None or found.best.step_us > _NEAR_BOUND * lower_bound_us(problem):
        other = _by_coarse(problem, budget_bytes, trials)
        if found is not None:
            other.space.positions_scheduled += found.space.positions_scheduled
        if found is None or found.best is None or (other.best and other.best.step_us <= found.best.step_us):
            found = other
    if found.best is not None and not is_comparison(trials):
        _tune_priorities(found)
    return found


def is_comparison(trials: int) -> bool:
    """Whether so few trials are only to compare problems: what makes a schedule a little better is not tried."""
    return trials <= COMPARISON_TRIALS


def _by_blocks(problem: Problem, blocks: RepeatedBlocks, budget_bytes: float, trials: int) -> Search:
    """What is found for few blocks, tried with all."""
    short = shortened(problem, blocks, _BLOCKS)
    small = searched(short.problem, budget_bytes, trials // 2)
    full = Search(SearchSpace(problem, budget_bytes, small.space.spare_bytes), _CARRIED)
    full.space.positions_scheduled += small.space.positions_scheduled
    if small.best is None:
        return full
    for period in _PERIODS:
        full.try_candidate(expanded(short, small.best.candidate, small.space, full.space, period))
    for size in _PLAIN:
        gather_ends = ends_of_units(problem.gathers, full.space.gather_sequences, size)
        reduction_ends = ends_of_units(problem.reductions, full.space.reduction_sequences, 1)
        full.try_candidate(replace(small.best.candidate, gather_ends=gather_ends, reduction_ends=reduction_ends))
    return full


def _by_coarse(problem: Problem, budget_bytes: float, trials: int) -> Search:
    """What is found for a coarser problem, tried with this one: buckets may be larger than few blocks."""
    coarse = coarsened(problem)
    small = searched(coarse.problem, budget_bytes, trials)
    full = Search(SearchSpace(problem, budget_bytes, small.space.spare_bytes), _CARRIED)
    full.space.positions_scheduled += small.space.positions_scheduled
    for other in small.different(_COARSE):
        full.try_candidate(coarse.refined(other.candidate, small.space, full.space))
    return full


def _spares(problem: Problem) -> list[int]:
    """What gradients that are larger leave free: nothing, one unit, or two."""
    unit_bytes: dict[str, int] = {}
    for reduction in problem.reductions:
        unit_bytes[reduction.unit] = unit_bytes.get(reduction.unit, 0) + reduction.grad_bytes
    median = sorted(unit_bytes.values())[len(unit_bytes) // 2] if unit_bytes else 0
    return [0, median, 2 * median]


# -- sizes


def _try_sizes(search: Search) -> None:
    space, problem = search.space, search.space.problem
    gathers = first_ends(problem.gathers, space.gather_sequences)
    reductions = first_ends(problem.reductions, space.reduction_sequences)
    for a, b in zip(gathers, reductions, strict=True):
        search.try_candidate(Candidate(a, b))
        search.try_candidate(Candidate(a, b, reserve_bytes=_reserve(space, b), gathers_first=False))
    if search.best is None:
        return
    # Buckets that are good only with other priorities would be lost.
    for found in search.different(_KINDS):
        for lookahead in _LOOKAHEADS[1:]:
            search.try_candidate(replace(found.candidate, lookahead=lookahead))
            search.try_candidate(replace(found.candidate, lookahead=lookahead, max_slack=_MAX_SLACKS[0]))
    for _ in range(2):
        before = search.best
        for ends in gathers:
            search.try_candidate(replace(search.best.candidate, gather_ends=ends))
        for ends in reductions:
            search.try_candidate(replace(search.best.candidate, reduction_ends=ends))
        _tune_priorities(search)
        if search.best is before:
            break


def _tune_priorities(search: Search) -> None:
    """Tries other priorities with the best buckets, one after the other."""
    assert search.best is not None
    for factor in _RESERVES:
        reserve = int(factor * _reserve(search.space, search.best.candidate.reduction_ends))
        search.try_candidate(replace(search.best.candidate, reserve_bytes=reserve))
    search.try_candidate(replace(search.best.candidate, gathers_first=not search.best.candidate.gathers_first))
    for max_slack in _MAX_SLACKS:
        search.try_candidate(replace(search.best.candidate, max_slack=max_slack))
    for lookahead in _LOOKAHEADS:
        search.try_candidate(replace(search.best.candidate, lookahead=lookahead))


def _reserve(space: SearchSpace, ends: BucketEnds) -> int:
    """Of a reduction that is larger than most."""
    costs: list[int] = []
    for number, places in enumerate(ends):
        first = 0
        for last in sorted(places):
            cost = space.reduction(number, first, last)
            costs.append(cost.held + cost.freed)
            first = last
    return sorted(costs)[3 * len(costs) // 4] if costs else 0


# -- boundaries


def _move_boundaries(search: Search) -> None:
    if search.best is None:
        return
    moves = list(_moves(search.space))
    improved = True
    while improved and search.trials_left > 0:
        improved = False
        for shifted in _shifted(search.best.candidate, _FEW):
            improved |= search.try_candidate(shifted)
        for gathers, number, places in moves:
            if search.trials_left <= 0:
                break
            for toggled in _toggled(search.best.candidate, gathers, number, places):
                improved |= search.try_candidate(toggled)
        before = search.best
        _tune_priorities(search)
        improved |= search.best is not before


def _with_ends(candidate: Candidate, gathers: bool, ends: BucketEnds) -> Candidate:
    return replace(candidate, gather_ends=ends) if gathers else replace(candidate, reduction_ends=ends)


def _shifted(candidate: Candidate, few: int) -> Iterator[Candidate]:
    """Boundaries moved, where there are few."""
    for gathers, all_ends in ((True, candidate.gather_ends), (False, candidate.reduction_ends)):
        for number, ends in enumerate(all_ends):
            count = max(ends)
            for end in sorted(ends)[:-1] if len(ends) <= few else ():
                for step in _SHIFTS:
                    if 0 < end + step < count:
                        changed = (ends - {end}) | {end + step}
                        new = (*all_ends[:number], changed, *all_ends[number + 1 :])
                        yield _with_ends(candidate, gathers, new)


def _toggled(candidate: Candidate, gathers: bool, number: int, places: frozenset[int]) -> Iterator[Candidate]:
    ends = candidate.gather_ends if gathers else candidate.reduction_ends
    for changed in (ends[number] | places, ends[number] - places):
        if changed != ends[number]:
            new = (*ends[:number], changed, *ends[number + 1 :])
            yield _with_ends(candidate, gathers, new)


def _moves(space: SearchSpace) -> Iterator[tuple[bool, int, frozenset[int]]]:
    """(gathers, sequence, boundaries): those at the same place of equal units, then single ones from both ends."""
    problem = space.problem
    moves: list[tuple[int, bool, int, frozenset[int]]] = []
    for gathers, sequences in ((True, space.gather_sequences), (False, space.reduction_sequences)):
        items: Tasks = problem.gathers if gathers else problem.reductions
        for number, sequence in enumerate(sequences):
            for places in _alike(items, sequence):
                for turn, some in enumerate(_some(sorted(places))):
                    moves.append((turn * _NEAR, gathers, number, some))
            for place in range(1, len(sequence)):
                moves.append((min(place, len(sequence) - place), gathers, number, frozenset((place,))))
    for _, gathers, number, places in sorted(moves, key=lambda move: move[0]):
        yield gathers, number, places


def _some(places: list[int]) -> Iterator[frozenset[int]]:
    """All, every second one, and those of one half of the program."""
    half = (len(places) + 1) // 2
    parts = (places, places[::2], places[1::2], places[:half], places[half:])
    yield from dict.fromkeys(frozenset(part) for part in parts if len(part) > 1)


def _alike(items: Tasks, sequence: Sequence[int]) -> list[frozenset[int]]:
    """Boundaries inside a sequence, by what lies in front of them in the unit."""
    found: dict[tuple[int, ...], set[int]] = {}
    before: tuple[int, ...] = ()
    for place, i in enumerate(sequence):
        if place and items[sequence[place - 1]].unit != items[i].unit:
            before = ()
        if place:
            found.setdefault((*before, items[i].wire_bytes), set()).add(place)
        before = (*before, items[i].wire_bytes)
    return [frozenset(places) for places in found.values()]
