"""Searches buckets: walks over the problem with wishes that get better.

First buckets of a size each, of gathers and of reductions in turn; then boundaries between buckets are put in and taken
out: those that lie alike in equal units all at once, then those near the ends of the program one by one.

Source: local search over partitions, as in iterated list scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.planner.blocks import Run, repeated, shortened, transferred
from graphshard.planner.bound import lower_bound_us
from graphshard.planner.coarse import coarsened
from graphshard.planner.first_buckets import ends_of_units, first_ends
from graphshard.planner.ground import Ends, Ground, Placed, Wish
from graphshard.planner.placing import placed
from graphshard.planner.problem import Gather, Problem, Reduction

_LEADS = (float("inf"), 4.0, 1.0)
_RESERVES = (0.0, 1.0, 2.0)
_SAFER = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5))
_KINDS = 4
_QUEUED = (0.0, 0.5, 1.0, 1e9)
# Boundaries as near to an end as this are moved by themselves before those of only a part of the program.
_NEAR = 6
# So many blocks stand for all; what is found for them is tried with these periods, in so many walks over all.
_BLOCKS = 8
_PERIODS = (1, 2, 3, 4)
_CARRIED = 20
# So few ops are walked themselves.
_FINE = 200
# So many of a coarser problem are tried with the problem itself.
_COARSE = 6
# What is carried over is compared with so many units in each bucket.
_PLAIN = (1, 4, 8)
# What is found for few blocks is compared with what a coarser problem gives if it is farther than this from the bound.
_NEAR_BOUND = 1.02
# What is as fast as the fastest.
_SAME = 1.001

# So few buckets are moved one by one, by so many members.
_FEW = 20
_SHIFTS = (-9, 9, -3, 3, -1, 1)


@dataclass
class Search:
    """Walks, and what they found.

    Attributes:
        ground: of the problem.
        walks: how many are left.
    """

    ground: Ground
    walks: int

    def __post_init__(self) -> None:
        self.seen: dict[Wish, Placed | None] = {}
        self.best: Placed | None = None

    def try_(self, wish: Wish) -> bool:
        """Whether `wish` is better than all before."""
        if wish in self.seen or self.walks <= 0:
            return False
        self.walks -= 1
        found = self.seen[wish] = placed(self.ground, wish)
        if found is None or (self.best is not None and found.step_us >= self.best.step_us):
            return False
        self.best = found
        return True

    def safer(self, found: Placed) -> Placed:
        """`found` with launches that are earlier and waits that are later, where that costs nothing.

        What really runs differs from what is predicted.
        """
        self.walks += len(_SAFER)
        for queued, margin in _SAFER:
            wish = replace(found.wish, queued=max(queued, found.wish.queued), margin=margin)
            self.try_(wish)
            other = self.seen.get(wish)
            if other is not None and other.step_us <= found.step_us and other.buckets <= found.buckets:
                return other
        return found

    def different(self, most: int) -> list[Placed]:
        """The fastest that differ in their buckets."""
        found = sorted((placed for placed in self.seen.values() if placed), key=lambda placed: placed.step_us)
        return list({frozenset(bucket for _, _, bucket in placed.steps): placed for placed in found[::-1]}.values())[
            ::-1
        ][:most]

    def good(self) -> list[Placed]:
        """Those that are as fast as the fastest, with the fewest collectives first."""
        if self.best is None:
            return []
        most_us = self.best.step_us * _SAME
        good = [found for found in self.seen.values() if found is not None and found.step_us <= most_us]
        return sorted(good, key=lambda found: (found.buckets, found.step_us))


def searched(problem: Problem, budget_bytes: float, walks: int = 240) -> Search:
    """What `walks` walks find."""
    tried: list[Search] = []
    for spare_bytes in _spares(problem):
        ground = Ground(problem, budget_bytes, spare_bytes)
        if not tried or (ground.fits and all(ground.late != other.ground.late for other in tried)):
            tried.append(Search(ground, walks // (1 + len(tried))))
            _sizes(tried[-1])
    found = [search for search in tried if search.best is not None] or tried
    best = min(found, key=lambda search: search.best.step_us if search.best is not None else 0.0)
    best.walks = max(best.walks, walks // 2)
    _boundaries(best)
    return best


def searched_by_blocks(problem: Problem, budget_bytes: float, walks: int = 240) -> Search:
    """The same; of a large problem, most walks are over few of the blocks that repeat, or over a coarser one."""
    if len(problem.ops) <= _FINE:
        return searched(problem, budget_bytes, walks)
    run = repeated(problem)
    found: Search | None = None
    if run is not None and run.count >= 2 * _BLOCKS:
        found = _by_blocks(problem, run, budget_bytes, walks)
    if found is None or found.best is None or found.best.step_us > _NEAR_BOUND * lower_bound_us(problem):
        other = _by_coarse(problem, budget_bytes, walks)
        if found is not None:
            other.ground.walked += found.ground.walked
        if found is None or found.best is None or (other.best and other.best.step_us <= found.best.step_us):
            found = other
    if found.best is not None:
        _habits(found)
    return found


def _by_blocks(problem: Problem, run: Run, budget_bytes: float, walks: int) -> Search:
    """What is found for few blocks, tried with all."""
    short = shortened(problem, run, _BLOCKS)
    model = searched(short.problem, budget_bytes, walks // 2)
    full = Search(Ground(problem, budget_bytes, model.ground.spare_bytes), _CARRIED)
    full.ground.walked += model.ground.walked
    if model.best is None:
        return full
    for period in _PERIODS:
        full.try_(transferred(short, model.best.wish, model.ground, full.ground, period))
    for size in _PLAIN:
        ends = (
            ends_of_units(problem.gathers, full.ground.gathers, size),
            ends_of_units(problem.reductions, full.ground.reductions, 1),
        )
        full.try_(replace(model.best.wish, gathers=ends[0], reductions=ends[1]))
    return full


def _by_coarse(problem: Problem, budget_bytes: float, walks: int) -> Search:
    """What is found for a coarser problem, tried with this one: buckets may be larger than few blocks."""
    coarse = coarsened(problem)
    model = searched(coarse.problem, budget_bytes, walks)
    full = Search(Ground(problem, budget_bytes, model.ground.spare_bytes), _CARRIED)
    full.ground.walked += model.ground.walked
    for other in model.different(_COARSE):
        full.try_(coarse.wish(other.wish, model.ground, full.ground))
    return full


def _spares(problem: Problem) -> list[int]:
    """What gradients that are larger leave free: nothing, one unit, or two."""
    unit_bytes: dict[str, int] = {}
    for reduction in problem.reductions:
        unit_bytes[reduction.unit] = unit_bytes.get(reduction.unit, 0) + reduction.grad_bytes
    median = sorted(unit_bytes.values())[len(unit_bytes) // 2] if unit_bytes else 0
    return [0, median, 2 * median]


# -- sizes


def _sizes(search: Search) -> None:
    ground, problem = search.ground, search.ground.problem
    gathers = first_ends(problem.gathers, ground.gathers)
    reductions = first_ends(problem.reductions, ground.reductions)
    for a, b in zip(gathers, reductions, strict=True):
        search.try_(Wish(a, b))
        search.try_(Wish(a, b, reserve_bytes=_reserve(ground, b), gathers_first=False))
    if search.best is None:
        return
    # Buckets that are good only with other habits would be lost.
    for found in search.different(_KINDS):
        for queued in _QUEUED[1:]:
            search.try_(replace(found.wish, queued=queued))
            search.try_(replace(found.wish, queued=queued, lead=_LEADS[0]))
    for _ in range(2):
        before = search.best
        for ends in gathers:
            search.try_(replace(search.best.wish, gathers=ends))
        for ends in reductions:
            search.try_(replace(search.best.wish, reductions=ends))
        _habits(search)
        if search.best is before:
            break


def _habits(search: Search) -> None:
    assert search.best is not None
    for factor in _RESERVES:
        reserve = int(factor * _reserve(search.ground, search.best.wish.reductions))
        search.try_(replace(search.best.wish, reserve_bytes=reserve))
    search.try_(replace(search.best.wish, gathers_first=not search.best.wish.gathers_first))
    for lead in _LEADS:
        search.try_(replace(search.best.wish, lead=lead))
    for queued in _QUEUED:
        search.try_(replace(search.best.wish, queued=queued))


def _reserve(ground: Ground, ends: Ends) -> int:
    """Of a reduction that is larger than most."""
    costs: list[int] = []
    for number, places in enumerate(ends):
        first = 0
        for last in sorted(places):
            cost = ground.reduction(number, first, last)
            costs.append(cost.held + cost.freed)
            first = last
    return sorted(costs)[3 * len(costs) // 4] if costs else 0


# -- boundaries


def _boundaries(search: Search) -> None:
    if search.best is None:
        return
    moves = list(_moves(search.ground))
    improved = True
    while improved and search.walks > 0:
        improved = False
        for shifted in _shifted(search.best.wish, _FEW):
            improved |= search.try_(shifted)
        for gathers, number, places in moves:
            for toggled in _toggled(search.best.wish, gathers, number, places):
                improved |= search.try_(toggled)
        before = search.best
        _habits(search)
        improved |= search.best is not before


def _shifted(wish: Wish, few: int) -> Iterator[Wish]:
    """Boundaries moved, where there are few."""
    for gathers, all_ends in ((True, wish.gathers), (False, wish.reductions)):
        for number, ends in enumerate(all_ends):
            count = max(ends)
            for end in sorted(ends)[:-1] if len(ends) <= few else ():
                for step in _SHIFTS:
                    if 0 < end + step < count:
                        changed = (ends - {end}) | {end + step}
                        new = (*all_ends[:number], changed, *all_ends[number + 1 :])
                        yield replace(wish, gathers=new) if gathers else replace(wish, reductions=new)


def _toggled(wish: Wish, gathers: bool, number: int, places: frozenset[int]) -> Iterator[Wish]:
    ends = wish.gathers if gathers else wish.reductions
    for changed in (ends[number] | places, ends[number] - places):
        if changed != ends[number]:
            new = (*ends[:number], changed, *ends[number + 1 :])
            yield replace(wish, gathers=new) if gathers else replace(wish, reductions=new)


def _moves(ground: Ground) -> Iterator[tuple[bool, int, frozenset[int]]]:
    """(gathers, sequence, boundaries): those that lie alike in equal units, then single ones from both ends."""
    problem = ground.problem
    moves: list[tuple[int, bool, int, frozenset[int]]] = []
    for gathers, sequences in ((True, ground.gathers), (False, ground.reductions)):
        items: Sequence[Gather] | Sequence[Reduction] = problem.gathers if gathers else problem.reductions
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


def _alike(items: Sequence[Gather] | Sequence[Reduction], sequence: Sequence[int]) -> list[frozenset[int]]:
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
