"""FSDP2's settings of a unit that shape a program."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, repr=False)
class UnitSettings:
    """FSDP2's settings of one unit that change a program but not what is traced, as they stand when it runs.

    Attributes:
        divide_factor: of `set_gradient_divide_factor`.
        force_sum: of `set_force_sum_reduction_for_comms`.
        all_reduce: of `set_requires_all_reduce`; False: gradients stay partial, reduced over the shards only.
        all_reduce_hook, custom_all_gather, custom_reduce_scatter: key of what a user supplied, ``""`` if nothing.
        scatter_buffers: of `set_reduce_scatter_max_input_buffers`: reduce-scatters in flight at once.
        scatter_group: name of the process group of `set_separate_reduce_scatter_group`, ``""``: that of the shards.
        forward_prefetch, backward_prefetch: names of the units whose gathers this unit launches; empty: the next one.
    """

    divide_factor: float | None = None
    force_sum: bool = False
    all_reduce: bool = True
    all_reduce_hook: str = ""
    custom_all_gather: str = ""
    custom_reduce_scatter: str = ""
    scatter_buffers: int = 1
    scatter_group: str = ""
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()

    def of_forward(self) -> UnitSettings:
        """Without those that matter in backward alone."""
        return UnitSettings(custom_all_gather=self.custom_all_gather, forward_prefetch=self.forward_prefetch)

    def of_backward(self) -> UnitSettings:
        """Without those that matter in forward alone."""
        return replace(self, forward_prefetch=())

    def without_prefetch(self) -> UnitSettings:
        """Without the units that users have chosen to prefetch."""
        return replace(self, forward_prefetch=(), backward_prefetch=())

    def __str__(self) -> str:
        """What differs from the defaults."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed)

    def __repr__(self) -> str:
        return f"UnitSettings({self})"


DEFAULT_SETTINGS = UnitSettings()
