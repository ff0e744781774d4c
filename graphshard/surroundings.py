"""What stands around a model that is to be compiled, and would make something else of it: wrappers of other engines,
accelerate's settings, optimizers that hold what sharding puts others in the places of, misspelt variables.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from graphshard import env
from graphshard.compat.dynamo import is_compiled_module
from graphshard.compat.interpreter import living
from graphshard.compat.modules import is_compiled_in_place, own_parameters
from graphshard.fsdp2.sharding_arguments import Refusal
from graphshard.planning.options import OTHERS, device_without_row
from graphshard.reporting.report import Report


def refused_wrappers(model: nn.Module) -> Iterator[Refusal]:
    """Engines around, or in, a model, that would do what graphshard does: reduce gradients, shard, compile."""
    for name, module in model.named_modules():
        where = f"compile: module '{name}'" if name else "compile: model"
        if isinstance(module, DistributedDataParallel):
            error = ValueError(
                f"{where}: got a DistributedDataParallel, which reduces gradients itself; want the {_inside(module)} "
                "in it, with strategy='replicate' for what DDP does (accelerate makes one where its FSDP plugin is "
                "not in force, as on CPU)"
            )
            yield Refusal("DDP", name, error)
        elif isinstance(module, FullyShardedDataParallel):
            error = ValueError(
                f"{where}: got a FullyShardedDataParallel, FSDP1's wrapper; want the {_inside(module)} in it, plain or "
                "annotated by fully_shard (in accelerate: fsdp_version=2)"
            )
            yield Refusal("FSDP1", name, error)
    if is_compiled_module(model):
        error = ValueError(
            f"compile: model: got what torch.compile made of a {_inside(model)}; want that model itself, and the "
            "torch.compile left out (in accelerate: dynamo_backend 'no', no TorchDynamoPlugin)"
        )
        yield Refusal("compiled model", "", error)


def _inside(wrapper: nn.Module) -> str:
    return type(next(wrapper.children())).__name__.removeprefix("FSDP")


def check_accelerate() -> None:
    """Refuses a plain model, and no mesh, where accelerate is to shard.

    Raises:
        ValueError: accelerate's FSDP2 plugin is in force.
    """
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized() and getattr(state.AcceleratorState(), "is_fsdp2", False):
        raise ValueError(
            "compile: model: got a plain model, while accelerate is to shard (fsdp_version=2): its prepare would take "
            "this one as sharded already, and its plugin's options would do nothing; want "
            "accelerator.prepare(model, optimizer) first, then graphshard.compile(model), or, of a model that "
            "accelerate is not to see, a mesh"
        )


def check_optimizers(model: nn.Module) -> None:
    """Refuses a plain model of which an optimizer holds parameters: sharding puts others in their places.

    Raises:
        ValueError: there is such an optimizer.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    if not _holders(names):
        return
    gc.collect()  # one that nothing but itself holds is none
    for name, held in _holders(names):
        raise ValueError(
            f"compile: model: got one of which an optimizer, {name}, holds {len(held)} parameters ('{held[0]}', ...); "
            "sharding puts others in their places, and it would train nothing: want it made behind "
            "graphshard.compile, of model.parameters()"
        )


def _holders(names: dict[int, str]) -> list[tuple[str, list[str]]]:
    """(Class, FQNs) of optimizers that hold parameters, which come as ids with FQNs."""
    held = ((opt, [names[id(param)] for param in _params(opt) if id(param) in names]) for opt in living(Optimizer))
    return [(type(optimizer).__name__, found) for optimizer, found in held if found]


def note_surroundings(model: nn.Module, annotated: bool, planned_for: str, report: Report) -> None:
    """Notes what is around a model that will be compiled, and may not be meant.

    Args:
        model: plain, or annotated.
        annotated: whether it was so when the user brought it.
        planned_for: type of the device whose row of the hardware table plans are made for; ``""``: another.
        report: of the model.
    """
    if device := device_without_row(planned_for):
        report.note_once(
            f"hardware: plans are made for {OTHERS}, since the table has no row for {device}: measure one by "
            f"`python -m graphshard.calibrate --merge {OTHERS} --out here.json`, and give its path as hardware="
        )
    for name, known in env.unknown().items():
        report.note_once(f"{name} is ignored: graphshard has no variable of this name, but {known}")
    if own := [name for name, module in model.named_modules() if is_compiled_in_place(module)]:
        report.note_once(
            f"torch.compile of {len(own)} modules ('{own[0]}', ...), by their own compile(), is traced through: leave "
            "it out"
        )
    for name, count in _optimizers_of_before(model) if annotated else ():
        report.note_once(
            f"an optimizer, {name}, holds {count} parameters that are in no module, of the shapes of this model's: if "
            "it was made before fully_shard, it trains nothing; want it made behind, of model.parameters()"
        )


def _optimizers_of_before(model: nn.Module) -> list[tuple[str, int]]:
    """(Class, number of parameters) of optimizers that seem to have been made before `fully_shard`: what they hold is
    in no module, and as much, of the same shapes and dtypes, as an annotated model trains. Nothing links the two: it
    may be another model's that is gone.
    """
    wanted = Counter((tuple(param.shape), param.dtype) for param in model.parameters() if param.requires_grad)
    found = []
    for optimizer in living(Optimizer):
        params = _params(optimizer)
        held = Counter((tuple(param.shape), param.dtype) for param in params)
        if held == wanted and not any(isinstance(param, DTensor) for param in params):
            found.append((type(optimizer).__name__, {id(param) for param in params}))
    if not found:
        return []
    registered = {id(param) for module in living(nn.Module) for param in own_parameters(module).values()}
    return [(name, len(held)) for name, held in found if not held & registered]


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
