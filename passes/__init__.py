"""THE PAGE: every pass of graphshard, in the order in which they run.

    Dynamo -> CAPTURED, COLLAPSE -> AOTAutograd -> JOINT -> partitioner -> EXPAND, of forward -> PROGRAM -> Inductor, or
                                                                           and of backward                 as it is
                                                                        -> EXPAND, of inference -> PROGRAM

A pass is a name and two functions: `decide(graph, ctx)` reads the graph and returns a frozen edit (falsy: nothing to
do), `apply(graph, edit)` does what the edit says. The driver copies the graph of a program (the others change in
place), verifies after each pass, times, dumps and recompiles once. Passes import `kernels`, `graph` and what is below
them, and one another never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from graphshard.graph.sameness import Sameness, bitwise
from graphshard.passes import (
    apply_flags,
    apply_residency,
    assign_buckets,
    choose_copies,
    collapse_blocks,
    detach_collectives,
    expand_blocks,
    fold_unshards,
    fuse_copies,
    hoist_reads,
    insert_collectives,
    order_launches,
    outline_blocks,
    share_reads,
    split_blocks,
    sum_by_units,
    tag_reshard,
)


@dataclass(frozen=True)
class Pass:
    """A step of the pipeline.

    Attributes:
        name: for logs, dumps and ``GRAPHSHARD_DISABLE``.
        decide: reads the graph and the context, returns a frozen, printable edit.
        apply: changes the graph as the edit says.
        optional: whether a program is right without it.
        changes_signature: whether it may change placeholders and results.
        permutes: whether it does nothing but reorder nodes.
        keeps: how alike what a graph computes is before and after it, by its edit.
        repairs: whether a graph before it is wrong, if only where ranks differ: what is computed is not compared.
        sends: whether what a program sends depends on it.
        brings: which of the program's flags it brings in, and with them other arguments and results.
    """

    name: str
    decide: Callable[..., Any]
    apply: Callable[..., None]
    optional: bool = False
    changes_signature: bool = False
    permutes: bool = False
    keeps: Callable[[Any], Sameness] = bitwise
    repairs: bool = False
    sends: bool = False
    brings: Literal["", "gathers", "gradients"] = ""


CAPTURED = (
    Pass("hoist_reads", hoist_reads.decide, hoist_reads.apply, repairs=True),
    Pass("share_reads", share_reads.decide, share_reads.apply),
    Pass("sum_by_units", sum_by_units.decide, sum_by_units.apply),
    Pass("detach_collectives", detach_collectives.decide, detach_collectives.apply, repairs=True),
)

COLLAPSE = Pass("collapse_blocks", collapse_blocks.decide, collapse_blocks.apply, optional=True)
EXPAND = Pass("expand_blocks", expand_blocks.decide, expand_blocks.apply)

JOINT = (
    Pass("split_blocks", split_blocks.decide, split_blocks.apply),
    Pass("fold_unshards", fold_unshards.decide, fold_unshards.apply, keeps=fold_unshards.keeps),
    Pass("tag_reshard", tag_reshard.decide, tag_reshard.apply),
)

OUTLINE = Pass("outline_blocks", outline_blocks.decide, outline_blocks.apply, optional=True)

PROGRAM = (
    Pass("fold_unshards", fold_unshards.decide, fold_unshards.apply, keeps=fold_unshards.keeps),
    Pass("apply_residency", apply_residency.decide, apply_residency.apply, changes_signature=True, brings="gathers"),
    Pass("apply_flags", apply_flags.decide, apply_flags.apply, changes_signature=True, brings="gradients"),
    OUTLINE,
    Pass("assign_buckets", assign_buckets.decide, assign_buckets.apply, optional=True, sends=True),
    Pass("choose_copies", choose_copies.decide, choose_copies.apply, optional=True, sends=True),
    Pass("insert_collectives", insert_collectives.decide, insert_collectives.apply),
    Pass("fuse_copies", fuse_copies.decide, fuse_copies.apply, optional=True),
    Pass("order_launches", order_launches.decide, order_launches.apply, optional=True, permutes=True, sends=True),
)
