"""What a rank that follows a contract does of it outside any graph (see `followed_pass`)."""

from __future__ import annotations

import torch

from graphshard.following.part_programs import PartPrograms
from graphshard.runtime import region
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.state.shards import Shard


class Rest:
    """Reads outside graphs, and what no graph of a pass has done.

    Args:
        runtime: of the model.
        parts: makes and runs programs of parts.
    """

    def __init__(self, runtime: ModelRuntime, parts: PartPrograms) -> None:
        self._runtime = runtime
        self._parts = parts
        runtime.follower.finish = parts.finish

    @torch.no_grad()
    def bring(self, shard: Shard) -> bool:
        """Gathers what is read outside any graph, if this forward follows a contract; returns whether it does."""
        follower = self._runtime.follower
        followed = follower.of_forward(follower.mode, self._runtime.holdings.shards.alone(shard), "", broken=True)
        if followed is not None:
            self._parts.bring(followed, shard)
        return followed is not None

    @torch.no_grad()
    def finish_forward(self) -> None:
        """A forward ends."""
        follower = self._runtime.follower
        if self._runtime.holdings.forward.in_backward:
            return
        if follower.forward is not None:
            self._parts.finish(follower.forward)
        follower.end_forward()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """A backward ends."""
        if (followed := self._runtime.follower.end_backward()) is not None:
            self._parts.finish(followed)


def rest_of_contracts(runtime: ModelRuntime) -> Rest:
    """Runs its programs operator by operator, in a region of its own."""
    own = region.Region(runtime, -1, {}, False, 0, None, {})
    return Rest(runtime, own.parts)
