"""What happens to parameters between forwards."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.compat.autograd import recomputes
from graphshard.state.shards import Shard


class ParameterWatch:
    """Notices, before a forward, what happened to parameters since the last one. A tight loop: it runs in every
    step.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        # (shard, its parameter, the flat shard it had, whether it was trainable, where it is registered, its name)
        self._seen = [
            (shard, shard.param, shard.param.flat_shard, shard.is_trainable, registered, name)
            for shard in shards
            for registered, name in shard.param.places
        ]

    def changed(self) -> bool:
        """Whether a flat shard is another tensor, or a parameter is trainable where it was not, or the reverse.

        Raises:
            RuntimeError: for a parameter that was replaced in its module.
        """
        changed = False
        for shard, param, flat, trainable, registered, name in self._seen:
            parameter = param.parameter
            if param.flat_shard is not flat or shard.is_trainable is not trainable:
                changed = True
            found = registered.get(name)
            # A checkpoint recomputes a forward that has taken it out, and puts it back.
            is_out = found is None and recomputes()
            if found is parameter or shard.is_registered(found) or is_out:
                continue
            if param.flat_shard is not flat and found is not None:
                # `load_state_dict(assign=True)` of a tied parameter: FSDP2 took what came to its first place.
                param.register(parameter)
            else:
                raise RuntimeError(
                    f"parameter '{shard.fqn}' was replaced after compile: got a {type(found).__name__} that FSDP2 does "
                    "not shard; copy values into the parameter instead (load_state_dict, or copy_ under no_grad)"
                )
        return changed
