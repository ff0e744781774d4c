"""From a name to something to estimate: builds, traces and measures a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.scale.checkpointing import CHECKPOINTING, block_runner
from graphshard.scale.estimate import Workload
from graphshard.scale.model_size import Repetition
from graphshard.scale.presets import Preset, find_preset
from graphshard.scale.repeat import TRACED_BLOCKS
from graphshard.scale.trace import Traced, trace_step

STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OTHER_TOKENS = 2048


@dataclass(frozen=True)
class ModelChoice:
    """What is traced.

    Attributes:
        model: name of a preset, or ``module:function``.
        batch: sequences of a microbatch, on each rank or tensor-parallel group.
        seq: tokens of a sequence; 0: the preset's.
        checkpointing: one of `CHECKPOINTING`; a function of yours does that itself.
        states: dtype of parameters, gradients and moments, one of `STATES`.
        tensor: ranks of the tensor-parallel axis.
    """

    model: str
    batch: int = 1
    seq: int = 0
    checkpointing: str = "none"
    states: str = "float32"
    tensor: int = 1


def make_workload(choice: ModelChoice, all_blocks: bool = False) -> Workload:
    """Traces a model once.

    Args:
        choice: what to trace.
        all_blocks: traces every block of a preset, instead of a few that stand for the others.

    Raises:
        ValueError: there is no such model, or it cannot be traced.
    """
    if choice.checkpointing not in CHECKPOINTING:
        raise ValueError(f"checkpointing: got {choice.checkpointing!r}, want one of {', '.join(CHECKPOINTING)}")
    if choice.states not in STATES:
        raise ValueError(f"states: got {choice.states!r}, want one of {', '.join(STATES)}")
    for name in ("batch", "tensor"):
        if getattr(choice, name) < 1:
            raise ValueError(f"{name}: got {getattr(choice, name)}, want at least 1")
    found = find_preset(choice.model)
    if not isinstance(found, Preset):
        return _from_function(choice, found)
    preset = found
    seq = choice.seq or preset.tokens
    if choice.tensor > 1 and seq % choice.tensor:
        raise ValueError(f"tp: got {choice.tensor} ranks for {seq} tokens, want a factor of them")
    layers = preset.layers if all_blocks else min(preset.layers, TRACED_BLOCKS)

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return preset.build(layers, seq, block_runner(choice.checkpointing)), preset.inputs(choice.batch, seq)

    traced = trace_step(build, choice.tensor, preset.tensor_parallel, STATES[choice.states])
    units = _block_units(traced)
    return Workload(traced, Repetition(units, preset.layers), choice.batch * seq)


def _from_function(choice: ModelChoice, function: Any) -> Workload:
    seq = choice.seq or _OTHER_TOKENS
    if choice.tensor > 1:
        raise ValueError(f"tp: got {choice.tensor} ranks, want 1 for a model of yours: only presets have a plan of it")

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        made = function(choice.batch, seq)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise ValueError(
                f"model: {choice.model} returned a {type(made).__name__}, want (module, inputs of its forward)"
            )
        model, inputs = made
        return model, tuple(inputs)

    traced = trace_step(build, state_dtype=STATES[choice.states])
    return Workload(traced, Repetition((), 0), choice.batch * seq)


def _block_units(traced: Traced) -> tuple[str, ...]:
    """The units of the repeated blocks, in order."""
    units = {param.unit for param in traced.params if param.unit}
    return tuple(sorted(units, key=lambda unit: int(unit.rpartition(".")[2])))
