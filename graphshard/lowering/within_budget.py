"""Lowers programs within their memory budget, which counts on the final graph, not on paper."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from torch.fx import GraphModule

from graphshard import env
from graphshard.agree.contract import Contract, contract_of
from graphshard.errors import VerifyError
from graphshard.graph import verify
from graphshard.graph.ir import PassContext
from graphshard.graph.liveness import peak_bytes
from graphshard.graph.plan import Decision
from graphshard.lowering import driver
from graphshard.lowering.driver import Lowered
from graphshard.planner import BudgetTooSmall
from graphshard.planning.planning import RegionPlanning

# What a graph allocates above what was foretold is taken off the budget so often.
_TRIES = 4


@dataclass(frozen=True)
class _Tried:
    lowered: Lowered
    decision: Decision | None
    peak_bytes: int


def lower_within_budget(
    gm: GraphModule,
    ctx: PassContext,
    title: str,
    planner: RegionPlanning | None,
    flags: str,
    contract: Contract | None = None,
    held_bytes: int = 0,
) -> tuple[Lowered, Decision | None]:
    """Makes one program of a marked graph, as `driver.lower` does, and what was decided for it.

    Its seconds in passes are those of every try, without the planner's (`RegionPlanning.spent_s`).

    Where the lowered graph allocates more than the budget, it is planned again with that much less. Where that does not
    help and no budget was asked for, units that are kept may come on top, which is noted unless flags that users set
    since keep more. Where that does not help either, what the graph of FSDP2's schedule allocates is the budget: of the
    others the one that allocates least is taken, if that is no more, else FSDP2's.

    Args:
        gm: graph with markers.
        ctx: its parameters and flags.
        title: of the dumps.
        planner: of the region; None: nothing is planned.
        flags: text of the program's flags, by which a stored plan is found.
        contract: of the program, if it was decided already: it is realised, and a broken budget is noted.
        held_bytes: that are held for other programs while it runs.

    Raises:
        BudgetTooSmall: `memory_budget` does not suffice.
        VerifyError: a pass breaks an invariant, or, at level 2, a stored plan does not keep its budget.
    """
    if planner is None:
        return driver.lower(gm, ctx, title), None
    ctx = replace(ctx, coalesces=planner.coalesces)
    start_s, planner_s = time.perf_counter(), planner.spent_s
    if contract is not None:
        lowered, decision = _lower_by_contract(gm, ctx, title, planner, flags, contract, held_bytes)
    else:
        lowered, decision = _lower_until_it_fits(gm, ctx, title, planner, flags)
    passes_s = time.perf_counter() - start_s - (planner.spent_s - planner_s)
    return replace(lowered, passes_s=passes_s), decision


def _lower_until_it_fits(
    gm: GraphModule, ctx: PassContext, title: str, planner: RegionPlanning, flags: str
) -> tuple[Lowered, Decision | None]:
    tried: list[_Tried] = []
    fits = _first_that_fits(gm, ctx, title, planner, flags, False, tried)
    if fits is None and planner.keeps_units:
        fits = _first_that_fits(gm, ctx, title, planner, flags, True, tried)
        if fits is not None:
            _note_on_top(planner, ctx, title, fits.peak_bytes)
    if fits is not None:
        return fits.lowered, fits.decision
    least = min(tried, key=lambda found: found.peak_bytes)
    assert least.decision is not None
    if planner.budget_is_asked:
        raise BudgetTooSmall(
            f"memory_budget: got {least.decision.budget_bytes} bytes for {ctx.direction}, want at least "
            f"{least.peak_bytes}: that is what {title} allocates"
        )
    lowered = driver.lower(gm, replace(ctx, planner=partial(planner, flags=flags, as_fsdp2=True)), title)
    assert planner.latest is not None
    needed = max(planner.latest.choice.simulation.peak_bytes, peak_bytes(lowered.gm.graph, ctx))
    if least.peak_bytes <= needed:
        if planner.keeps_units:
            _note_on_top(planner, ctx, title, least.peak_bytes)
        return least.lowered, replace(least.decision, budget_bytes=needed)
    planner.note(f"{title}: no other plan keeps to the memory of FSDP2's, which is taken")
    return lowered, replace(planner.latest, budget_bytes=needed)


def _note_on_top(planner: RegionPlanning, ctx: PassContext, title: str, peak: int) -> None:
    stay = {ctx.params[name].unit for name in (*ctx.flags.kept, *ctx.flags.resident)}
    if planner.has_kept(stay) and (more := peak - planner.fsdp2_bytes) > 0:
        planner.note(
            f"{title} [{ctx.flags}]: allocates {peak} bytes, for units that stay gathered {more} more than FSDP2's "
            "schedules by the flags of its capture; for less, want reshard_after_forward=True or a memory_budget"
        )


def _first_that_fits(
    gm: GraphModule,
    ctx: PassContext,
    title: str,
    planner: RegionPlanning,
    flags: str,
    on_top: bool,
    tried: list[_Tried],
) -> _Tried | None:
    """The first program that allocates no more than its budget. `on_top`: of kept units; `tried`: takes the others."""
    short_bytes = 0
    for number in range(_TRIES):
        planner.forget()  # a program without collectives is not planned
        planned = replace(ctx, planner=partial(planner, flags=flags, short_bytes=short_bytes, on_top=on_top))
        try:
            lowered = driver.lower(gm, planned, title)
        except BudgetTooSmall:
            if number or planner.keeps_units:
                return None
            raise
        decision = planner.latest
        if decision is None or not planner.chooses:
            return _Tried(lowered, decision, 0)
        peak = peak_bytes(lowered.gm.graph, ctx)
        if planner.replayed and peak > decision.budget_bytes:
            _check_stored(lowered, ctx, planner, decision)
        found = _Tried(lowered, decision, peak)
        if peak <= decision.budget_bytes or planner.replayed:
            return found
        tried.append(found)
        over_bytes, unseen_bytes = peak - decision.budget_bytes, peak - decision.choice.simulation.peak_bytes
        short_bytes = max(short_bytes + over_bytes, unseen_bytes)
    return None


def _lower_by_contract(
    gm: GraphModule,
    ctx: PassContext,
    title: str,
    planner: RegionPlanning,
    flags: str,
    contract: Contract,
    held_bytes: int,
) -> tuple[Lowered, Decision | None]:
    without = ctx.without.union(contract.without)
    # FSDP2's order follows from the graph, and is the same in all that users call alike; so does that without a pass.
    if not planner.chooses or contract.without:
        planner.forget()
        lowered = driver.lower(gm, replace(ctx, planner=partial(planner, flags=flags), without=without), title)
        if contract_of(lowered.gm.graph, None, ()).launches == contract.launches:
            return lowered, planner.latest
    planner.forget()
    planned = partial(planner, flags=flags, contract=contract)
    # In another graph, buckets and their order are what the contract says only by the passes that do so.
    kept = {"assign_buckets", "order_launches"}.intersection(contract.without)
    lowered = driver.lower(gm, replace(ctx, planner=planned, without=without - kept), title)
    found = contract_of(lowered.gm.graph, planner.latest, ())
    if found.launches != contract.launches:
        raise AssertionError(f"{title}: launches {found.launches}, want {contract.launches}, which all ranks agreed on")
    latest = planner.latest
    if latest is not None and planner.budget_is_asked:
        peak = peak_bytes(lowered.gm.graph, ctx) + held_bytes
        if peak > latest.budget_bytes:
            held = f" (with {held_bytes} held for other parts of the call)" if held_bytes else ""
            planner.note(
                f"{title}: allocates {peak} bytes{held}, more than memory_budget, {latest.budget_bytes}: the "
                "collectives that all ranks agreed on were planned for other shapes, or for a call in one graph"
            )
    return lowered, latest


def _check_stored(lowered: Lowered, ctx: PassContext, planner: RegionPlanning, decision: Decision) -> None:
    """S2 for a plan that is replayed as it is."""
    if level := env.verify_level():
        try:
            verify.check_budget(lowered.gm.graph, ctx, decision.budget_bytes)
        except VerifyError as error:
            if level > 1:
                raise
            planner.note(f"{error}, as the plan's budget says")
