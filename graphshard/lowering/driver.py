"""Runs the passes: copies the graph once, verifies after each pass, times, dumps, recompiles once.

At level 2 it also runs the graph before and after each pass, in a world that is in this process (`validation`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from textwrap import shorten

from torch.fx import Graph, GraphModule

from graphshard import env
from graphshard.compat.inductor import copy_graph, module_of
from graphshard.compat.interpreter import without_collection
from graphshard.errors import VerifyError
from graphshard.files import make_private
from graphshard.graph import verify
from graphshard.graph.ir import PassContext, output_args, reductions, shard_placeholder
from graphshard.graph.unit_ranges import mark_units
from graphshard.passes import CAPTURED, COLLAPSE, EXPAND, JOINT, OUTLINE, PROGRAM, Pass
from graphshard.reporting.artifacts import show_graph
from graphshard.validation import Before

log = logging.getLogger(__name__)

OPTIONAL = frozenset(step.name for step in (COLLAPSE, *JOINT, *PROGRAM) if step.optional)
# Those on which what a program sends does not depend: a rank leaves them out alone.
OWN = OPTIONAL - {step.name for step in PROGRAM if step.sends}
Say = Callable[[str], object]
# Of what a pass decided a log gets so many characters.
_LOGGED, _LONGER = 2000, " ... (all of it: GRAPHSHARD_DUMP)"
# The level from which on graphs are run before and after a pass, and optional passes that fail are left out.
RUNS = 2


def check_environment() -> None:
    """Raises:
    ValueError: if one of graphshard's environment variables has a value that it cannot have.
    """
    env.verify_level()
    env.verify_limit_mib()
    env.disabled_passes(OPTIONAL)
    directory = env.dump_dir()
    if directory is not None and directory.exists() and not directory.is_dir():
        raise ValueError(f"GRAPHSHARD_DUMP: got {directory}, which is a file, want a directory")
    try:
        if directory is not None:
            make_private(directory)
    except OSError as error:
        raise ValueError(f"GRAPHSHARD_DUMP: got {directory}, want a directory that can be made: {error}") from error


def shared_environment() -> str:
    """What the ranks must have in common of it: they leave passes out together."""
    return f"GRAPHSHARD_VERIFY {'runs' if env.verify_level() >= RUNS else 'does not run'} programs"


_Observer = Callable[[GraphModule, str], None]
_after_lowering: ContextVar[tuple[_Observer, ...]] = ContextVar("after_lowering", default=())


@contextmanager
def after_lowering(observer: _Observer) -> Iterator[None]:
    """Calls `observer(gm, direction)` on every program that is lowered inside, before it is compiled: on those, too,
    that this rank expects in vain, since another one decides otherwise.

    For tools and tests: the observer may read the graph, or change it on purpose to see that a check notices.
    """
    token = _after_lowering.set((*_after_lowering.get(), observer))
    try:
        yield
    finally:
        _after_lowering.reset(token)


@dataclass(frozen=True)
class Lowered:
    """A lowered graph.

    Attributes:
        gm: it.
        passes_s: seconds that passes took.
        edits: (pass, edit) of each pass that did something.
        unchecked: a line for each pass whose results level 2 could not compare, with the reason.
    """

    gm: GraphModule
    passes_s: float
    edits: tuple[tuple[str, object], ...]
    unchecked: tuple[str, ...] = ()


def run_captured_passes(gm: GraphModule, title: str, say: Say = log.warning) -> None:
    """Runs `CAPTURED` on a graph of Dynamo's, in place, and before on those inside it: checkpoint regions, branches.

    Such a graph has no fake values and may write tensors: only G1 and V1 can be checked.

    Args:
        gm: the graph.
        title: of the dumps.
        say: is told what is not checked; here and below.
    """
    for name, inner in reversed([*gm.named_modules()]):
        if isinstance(inner, GraphModule):
            ctx = PassContext("inner" if name else "captured")
            where = f"{title}{'.' + name if name else ''}"
            show_graph(inner.graph, where, 0, "captured")
            for number, step in enumerate(CAPTURED, start=1):
                if edit := step.decide(inner.graph, ctx):
                    _apply_captured(inner.graph, step, edit, ctx, where, number, say)
                    inner.recompile()


def _apply_captured(
    graph: Graph,
    step: Pass,
    edit: object,
    ctx: PassContext,
    title: str,
    number: int,
    say: Say,
    blocks: Mapping[str, GraphModule] | None = None,
) -> None:
    level = env.verify_level()
    before = Before(graph, ctx, blocks or {}) if level >= RUNS and not step.repairs else None
    step.apply(graph, edit)
    with _named(step, edit, title):
        if level:
            verify.check_lint(graph)
        if before is not None:
            _compare(before, graph, step, edit, title, say)
    _decided(graph, title, number, step, edit)


def leaves_out(error: VerifyError, passes: frozenset[str], ctx: PassContext, say: Say, title: str) -> PassContext:
    """A context without the pass that has failed; says so.

    Args:
        error: its failure.
        passes: that may be left out.
        ctx: with it.
        say: is told.
        title: of the program.

    Raises:
        VerifyError: `error`, where the pass may not be left out, or GRAPHSHARD_VERIFY is below 2.
    """
    if error.step not in passes - ctx.without or env.verify_level() < RUNS:
        raise error
    say(f"pass {error.step} is left out of {title}: {shown(error)}")
    return replace(ctx, without=ctx.without | {error.step})


def shown(error: VerifyError) -> str:
    """The first line of an error, which has a graph behind it."""
    return str(error).splitlines()[0]


def collapse(graph: Graph, edit: object, title: str, blocks: Mapping[str, GraphModule], say: Say = log.warning) -> None:
    """Runs `COLLAPSE` on a graph of Dynamo's as an edit says, in place. `blocks`: what calls stand for, by body."""
    ctx = PassContext("captured")
    _apply_captured(graph, COLLAPSE, edit, ctx, f"{title}.captured", len(CAPTURED) + 1, say, blocks)


def expand(gm: GraphModule, title: str, say: Say = log.warning) -> None:
    """Runs `EXPAND` on a graph of the compiler's front end, in place: its parameters are not known yet."""
    _run(gm.graph, (EXPAND,), PassContext("joint"), title, say)
    gm.recompile()


def run_joint_passes(gm: GraphModule, title: str = "joint", say: Say = log.warning) -> float:
    """Runs `JOINT` on a joint graph, in place; returns the seconds it took."""
    start = time.perf_counter()
    _run(gm.graph, JOINT, PassContext("joint"), title, say)
    gm.recompile()
    return time.perf_counter() - start


def check_partition(forward: GraphModule, num_results: int) -> None:
    """Checks what the partitioner made: no gathered parameter is saved that should be gathered again."""
    if env.verify_level():
        verify.check_reshard(forward.graph, num_results)


def mark_seams(
    gm: GraphModule, ctx: PassContext, title: str, optional: frozenset[str] = frozenset(), say: Say = log.warning
) -> PassContext:
    """Runs `OUTLINE` on a marked graph, in place: all of its programs have these seams, if there are some.

    Args:
        gm: the graph.
        ctx: its parameters and flags.
        title: of the dumps.
        optional: passes that may be left out where they fail: returns a context without this one then.
        say: is told what is not checked, and what is left out.
    """
    seamless = copy_graph(gm) if env.verify_level() >= RUNS else gm.graph
    try:
        _run(gm.graph, (OUTLINE,), ctx, title, say)
    except VerifyError as error:
        ctx = leaves_out(error, optional, ctx, say, title)
        gm.graph = seamless
    return ctx


@without_collection()
def lower(gm: GraphModule, ctx: PassContext, title: str) -> Lowered:
    """Makes one program of a marked graph; `gm` stays as it is.

    Args:
        gm: forward, backward or inference graph with markers.
        ctx: its parameters and flags.
        title: of the dumps.

    Raises:
        VerifyError: when a pass breaks an invariant.
    """
    start = time.perf_counter()
    level, unchecked = env.verify_level(), list[str]()
    graph = copy_graph(gm)
    mark_units(graph, ctx)
    edits = _run(graph, PROGRAM, ctx, title, unchecked.append)
    if level:
        verify.check_lowered(graph)
        verify.check_reductions(graph, ctx, _synchronized(gm.graph, graph, ctx))
    lowered = module_of(gm, graph)
    for observer in _after_lowering.get():
        observer(lowered, ctx.direction)
        lowered.recompile()
    return Lowered(lowered, time.perf_counter() - start, tuple(edits), tuple(dict.fromkeys(unchecked)))


def _synchronized(marked: Graph, lowered: Graph, ctx: PassContext) -> frozenset[str]:
    """FQNs whose gradient the program must reduce: all with a result that is alive and not left unreduced."""
    alive = output_args(lowered)
    position = {node: i for i, node in enumerate(output_args(marked)) if node is not None}
    names = [
        shard_placeholder(node).name
        for node in reductions(marked)
        if verify.reduction_kinds(node, ctx) and (node not in position or alive[position[node]] is not None)
    ]
    return frozenset(ctx.params[name].fqn for name in names if name not in ctx.flags.unreduced)


@contextmanager
def _named(step: Pass, edit: object, title: str) -> Iterator[None]:
    """Says in a `VerifyError` from inside which pass it is of."""
    try:
        yield
    except VerifyError as error:
        error.step = step.name
        error.add_note(f"after pass {step.name} of {title}: {edit}")
        raise


def _run(graph: Graph, passes: tuple[Pass, ...], ctx: PassContext, title: str, say: Say) -> list[tuple[str, object]]:
    level, disabled = env.verify_level(), env.disabled_passes(OPTIONAL)
    if level:
        verify.check_lint(graph)
    show_graph(graph, title, 0, "captured")
    edits: list[tuple[str, object]] = []
    recomputed: verify.Recomputed | None = {} if level > 1 else None
    for number, step in enumerate(passes, start=1):
        if step.name in disabled or step.name in ctx.without:
            continue
        edit = step.decide(graph, ctx)
        if not edit:
            continue
        before = _Before(graph, ctx, step) if level else None
        running = Before(graph, ctx) if level >= RUNS else None
        step.apply(graph, edit)
        if before is not None:
            with _named(step, edit, title):
                before.check(graph, recomputed)
                if running is not None:
                    _compare(running, graph, step, edit, title, say)
        edits.append((step.name, edit))
        _decided(graph, title, number, step, edit)
    return edits


def _compare(before: Before, graph: Graph, step: Pass, edit: object, title: str, say: Say) -> None:
    """V1."""
    if why := before.check(graph, step.name, title, step.keeps(edit), step.brings):
        say(f"GRAPHSHARD_VERIFY=2 does not run what pass {step.name} changes: {why}")


class _Before:
    """What must be the same after a pass."""

    def __init__(self, graph: Graph, ctx: PassContext, step: Pass) -> None:
        self._ctx, self._step = ctx, step
        self._signature = verify.signature(graph)
        if step.permutes:
            self._names, self._random = [node.name for node in graph.nodes], verify.random_operators(graph)
        # Flags choose what is reduced; folding makes two gathers or reductions of one parameter one.
        sends_the_same = ctx.direction != "joint" and not step.changes_signature and step.name != "fold_unshards"
        self._traffic = verify.traffic(graph, ctx) if sends_the_same else None

    def check(self, graph: Graph, recomputed: verify.Recomputed | None) -> None:
        verify.check_lint(graph)
        verify.check_values(graph, recomputed)
        verify.check_waits(graph)
        verify.check_hazards(graph)
        verify.check_dtypes(graph)
        if not self._step.changes_signature:
            verify.check_signature(graph, self._signature)
        if self._step.permutes:
            verify.check_permutation(graph, self._names, self._random)
        if self._ctx.direction != "joint":
            verify.check_buckets(graph, self._ctx)
        if self._traffic is not None:
            verify.check_traffic(graph, self._ctx, self._traffic)


def _decided(graph: Graph, title: str, number: int, step: Pass, edit: object) -> None:
    if log.isEnabledFor(logging.DEBUG):
        log.debug("graphshard: %s: pass %s: %s", title, step.name, shorten(str(edit), _LOGGED, placeholder=_LONGER))
    show_graph(graph, title, number, step.name, edit)
