"""A few training steps of a model, and everything they computed, kept for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

Inputs = Callable[[int, int], tuple[Any, ...]]
Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Named = dict[str, Tensor | None]


@dataclass
class StepRecord:
    """One step on this rank. Tensors are copies; those of sharded parameters are DTensors.

    Attributes:
        losses: of each microbatch.
        outputs: of each microbatch, detached.
        gradients: before the optimizer's step, by FQN; None where a parameter has none.
        parameters: after it, by FQN.
        buffers: after it, by FQN.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    gradients: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)


def default_loss(output: object) -> Tensor:
    """Mean square of every floating-point tensor of an output that requires a gradient, summed."""
    leaves = [leaf for leaf in _tensors(output) if leaf.requires_grad]
    if not leaves:
        raise ValueError("no tensor of the output requires a gradient: pass loss=")
    terms = [leaf.square().mean() if leaf.dtype == torch.float64 else leaf.float().square().mean() for leaf in leaves]
    return sum(terms[1:], terms[0])


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, whose state shows what a gradient was in the steps before."""
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass(frozen=True)
class StepSequence:
    """What is run, the same for the reference and for the compiled model.

    Attributes:
        inputs: `inputs(index, rank)`: the positional arguments, or (args, kwargs), of the microbatch with that index,
            from 0.
        loss: of an output.
        optimizer: made from the parameters.
        steps: number of optimizer steps.
        microbatches: forwards and backwards per step.
        sync: reduce gradients in the backward of the ``"last"`` microbatch, or of ``"every"`` one.
        train: False: forwards only, under `torch.no_grad()`.
        seed: each forward starts from random numbers that follow from it, the microbatch's index and the rank.
        device: inputs are moved there.
    """

    inputs: Inputs
    loss: Loss = default_loss
    optimizer: MakeOptimizer = default_optimizer
    steps: int = 3
    microbatches: int = 1
    sync: Literal["last", "every"] = "last"
    train: bool = True
    seed: int = 0
    device: str = "cpu"


class Trainer:
    """Runs a `StepSequence` on one model, step by step.

    Args:
        model: sharded.
        sequence: what to run.
    """

    def __init__(self, model: nn.Module, sequence: StepSequence) -> None:
        self._model = model
        self._sequence = sequence
        self._optimizer = sequence.optimizer(model.parameters()) if sequence.train else None

    def compute(self, step: int) -> StepRecord:
        """Forwards and backwards of a step: losses, outputs and gradients."""
        sequence, record = self._sequence, StepRecord()
        for microbatch in range(sequence.microbatches):
            if sequence.microbatches > 1 and sequence.sync == "last" and sequence.train:
                last = microbatch == sequence.microbatches - 1
                cast(FSDPModule, self._model).set_requires_gradient_sync(last)
            index, rank = step * sequence.microbatches + microbatch, dist.get_rank()
            args, kwargs = _arguments(moved(sequence.inputs(index, rank), sequence.device))
            torch.manual_seed((sequence.seed << 20) + (index << 8) + rank)
            with torch.set_grad_enabled(sequence.train):
                output = self._model(*args, **kwargs)
            if sequence.train:
                loss = sequence.loss(output)
                record.outputs.append(copied(output))  # backward may free or overwrite it
                torch.autograd.backward(loss)
                record.losses.append(copied(loss))
            else:
                record.outputs.append(copied(output))
        record.gradients = gradients(self._model)
        return record

    def update(self, record: StepRecord) -> StepRecord:
        """The optimizer's step; completes `record` with the parameters and buffers after it."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # without a backward, eager FSDP2 leaves the root gathered
        record.parameters, record.buffers = parameters(self._model), buffers(self._model)
        return record


def gradients(model: nn.Module) -> Named:
    """Copies of the gradients by FQN, None where there is none."""
    return {name: None if p.grad is None else copied(p.grad) for name, p in model.named_parameters()}


def parameters(model: nn.Module) -> Named:
    """Copies of the parameters by FQN."""
    return {name: copied(p) for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> Named:
    """Copies of the buffers by FQN."""
    return {name: copied(b) for name, b in model.named_buffers()}


def copied(value: Any) -> Any:
    """`value` with every tensor in its dicts, lists and tuples detached and copied; other objects as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def moved(value: Any, device: str) -> Any:
    """`value` with every tensor in its dicts, lists, tuples and dataclasses on a kind of device; on CPU as it is."""
    if device == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value


def place(model: nn.Module, device: str) -> nn.Module:
    """Moves a plain model to a kind of device, in place; one on the meta device stays there, as one on CPU does."""
    if device == "cpu" or any(parameter.is_meta for parameter in model.parameters()):
        return model
    return model.to(device)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _arguments(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match given:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return given, {}
    raise TypeError(f"inputs(index, rank): got a {type(given).__name__}, want a tuple of arguments or (args, kwargs)")
