"""The parts that run one compiled model, as its regions see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphshard.capture.twins import Twins
from graphshard.following.follower import Follower
from graphshard.runtime.outside_reads import OutsideReads
from graphshard.runtime.prefetch import Prefetch
from graphshard.runtime.running_backward import RunningBackward
from graphshard.state.holdings import Holdings
from graphshard.state.model_context import ModelContext


@dataclass
class ModelRuntime:
    """What runs one model. The engine keeps it alive; regions, which Dynamo keeps, do not.

    Attributes:
        context: of the model.
        holdings: what its shards hold.
        prefetch: gathers between its regions.
        follower: knows what other ranks make of its calls.
        backward: that runs.
        outside: reads of parameters outside any program.
        twins: its blocks that are alike.
        capture_each_size: has each size captured by itself from the next call on; is told why.
    """

    context: ModelContext
    holdings: Holdings
    prefetch: Prefetch
    follower: Follower
    backward: RunningBackward
    outside: OutsideReads
    twins: Twins
    capture_each_size: Callable[[str], None] = lambda why: None
