"""What the planner found in earlier processes, by all that it follows from: the problem, the budget and the sources.

What a rank decides is the same with an entry or without: one that misses it plans again. Entries lie beside Inductor's,
and go wherever `torch.compiler.save_cache_artifacts` takes those. ``torch.compiler.config.force_disable_caches`` turns
it off.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from graphshard.compat.cache import carry_entry, read_entry, write_entry
from graphshard.compat.inductor import source_digest
from graphshard.files import parse_json
from graphshard.planner import (
    Bucket,
    Choice,
    Problem,
    Schedule,
    ScheduledStep,
    best_schedule,
    check_schedule,
    choose_residency,
    lower_bound_us,
    simulate,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


def remembered_schedule(problem: Problem, budget_bytes: int | None) -> Choice:
    """As `best_schedule`.

    Raises:
        BudgetTooSmall: nothing fits; that is not remembered.
    """

    def decoded(entry: Any) -> Choice:
        buckets = tuple(Bucket(kind, tuple(members)) for kind, members in entry["buckets"])
        schedule = Schedule(buckets, tuple(ScheduledStep(*step) for step in entry["steps"]))
        check_schedule(problem, schedule)
        simulation = simulate(problem, schedule)
        if budget_bytes is not None and simulation.peak_bytes > budget_bytes:
            raise ValueError(f"allocates {simulation.peak_bytes} bytes, want at most {budget_bytes}")
        baselines = tuple((str(name), float(us), int(peak)) for name, us, peak in entry["baselines"])
        return Choice(schedule, simulation, lower_bound_us(problem), str(entry["name"]), baselines)

    def encoded(choice: Choice) -> Any:
        buckets = [(bucket.kind, bucket.members) for bucket in choice.schedule.buckets]
        return {"name": choice.name, "buckets": buckets, "steps": choice.schedule.steps, "baselines": choice.baselines}

    key = _key("schedule", problem, budget_bytes)
    return _remembered(key, lambda: best_schedule(problem, budget_bytes), encoded, decoded)


def remembered_residency(forward: Problem, backward: Problem, budget_bytes: int) -> frozenset[str]:
    """As `choose_residency`."""
    units = {gather.unit for gather in forward.gathers}

    def decoded(entry: Any) -> frozenset[str]:
        kept = frozenset(map(str, entry))
        if not kept <= units:
            raise ValueError(f"keeps {sorted(kept - units)}, which are no units")
        return kept

    key = _key("residency", forward, backward, budget_bytes)
    return _remembered(key, lambda: choose_residency(forward, backward, budget_bytes), sorted, decoded)


def _key(kind: str, *given: object) -> str:
    return hashlib.sha256("\n".join((kind, source_digest(), *map(repr, given))).encode()).hexdigest()


def _remembered(key: str, made: Callable[[], T], encoded: Callable[[T], Any], decoded: Callable[[Any], T]) -> T:
    if (content := read_entry(key)) is not None:
        try:
            known = decoded(parse_json(content))
            carry_entry(key, content)
            return known
        except Exception as error:  # an entry may hold anything, and is needed for nothing
            log.warning(
                "graphshard: plan cache: entry %s is ignored, and made again: %.300s", key[:16], ascii(str(error))
            )
    found = made()
    write_entry(key, json.dumps(encoded(found)).encode())
    return found
