"""What is found in parameters and buffers, by looking at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch

from graphshard import fsdp2
from graphshard.compat.modules import hooks_of_parameter, own_buffers
from graphshard.examining.diagnosis import Finding
from graphshard.examining.subject import OwnedParameter, Subject
from graphshard.fsdp2.sharding_arguments import Refusal, refused_dtypes

# In an error of ours, what comes before what to do about it.
_WHAT_TO_DO = re.compile(r"[;:] (?=(?:want|make|move|register|run|name|only) )")


def parameter_findings(subject: Subject) -> Iterator[Finding]:
    """Findings of a model's parameters."""
    yield from _tied(subject)
    yield from _mixed(subject)
    for kind, holds, what, verdict, to_do in _KINDS:
        if found := [owned for owned in subject.parameters if holds(owned)]:
            yield Finding(kind, tuple(owned.name for owned in found), what, verdict, to_do)
    if found := [owned for owned in subject.parameters if owned.unit is not None and owned.is_uneven]:
        pads = sum(_padded_share(owned) > 1 for owned in found)
        more = f"; {pads} of them take twice their memory or more" if pads else ""
        yield Finding(
            "uneven",
            tuple(owned.name for owned in found),
            f"not divisible by the shards in the dim that is sharded: padded to equal shards in each collective{more}",
            "handled",
        )
    yield from _outside_units(subject)
    yield from _meta(subject)
    yield from _parameter_hooks(subject)


def refusal_findings(refusals: Iterator[Refusal]) -> Iterator[Finding]:
    """What `compile`, or the first forward, refuses: one finding for each error."""
    for refusal in refusals:
        text = str(refusal.error).removeprefix("compile: ")
        what, *to_do = _WHAT_TO_DO.split(text, 1)
        yield Finding(refusal.kind, (refusal.where,), what, "refused", *to_do)


def _trains_numbers(owned: OwnedParameter) -> bool:
    return owned.unit is not None and not owned.param.dtype.is_floating_point and not owned.param.is_complex()


_KINDS: tuple[tuple[str, Callable[[OwnedParameter], bool], str, str, str], ...] = (
    (
        "frozen",
        lambda owned: owned.unit is not None and not owned.param.requires_grad,
        "requires no gradient: gathered with its unit, never reduced",
        "handled",
        "",
    ),
    (
        "not floating",
        _trains_numbers,
        "holds no floating-point numbers: gathered as it is, mp_policy does not cast it",
        "handled",
        "",
    ),
    (
        "no elements",
        lambda owned: owned.unit is not None and 0 in owned.size,
        "has no elements, and so has its gradient, where eager FSDP2 fails in backward",
        "handled",
        "",
    ),
    (
        "tensor-parallel",
        lambda owned: owned.unit is not None and owned.tensor_parallel,
        "is a DTensor: its part on this rank is sharded again over the data-parallel ranks",
        "handled",
        "",
    ),
    (
        "all-gather extension",
        lambda owned: owned.unit is not None and owned.extended,
        "its tensor subclass says what is gathered: fsdp_pre_all_gather is called once before each forward, "
        "fsdp_post_all_gather is traced",
        "handled",
        "have fsdp_post_all_gather use no tensor but those it is given; write no such parameter between a forward and "
        "its backward",
    ),
)


def _padded_share(owned: OwnedParameter) -> float:
    assert owned.shards
    length = owned.size[owned.dim]
    return (-(-length // owned.shards) * owned.shards - length) / max(length, 1)


def _tied(subject: Subject) -> Iterator[Finding]:
    if found := [owned for owned in subject.parameters if len(owned.names) > 1]:
        where = tuple(" = ".join(owned.names) for owned in found)
        yield Finding("tied", where, "one parameter under several names: gathered once, reduced once", "handled")


def _mixed(subject: Subject) -> Iterator[Finding]:
    """Units of several dtypes, whose trainable parameters must have one."""
    for unit, parameters in subject.by_unit().items():
        dtypes = {owned.param.dtype for owned in parameters}
        trainable = {owned.name: owned.param.dtype for owned in parameters if owned.param.requires_grad}
        refused = list(refusal_findings(refused_dtypes(unit, trainable)))
        yield from refused
        if len(dtypes) > 1 and not refused:
            said = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            yield Finding(
                "mixed dtypes", (unit,), f"unit of {said}: those that train are of one dtype, as FSDP2 wants", "handled"
            )


def _outside_units(subject: Subject) -> Iterator[Finding]:
    if found := [owned for owned in subject.parameters if owned.unit is None]:
        plain = subject.state == "plain"
        yield Finding(
            "in no unit",
            tuple(owned.name for owned in found),
            "neither sharded nor reduced: each rank has all of it, and its own gradient",
            "ignored",
            ""
            if plain
            else "call fully_shard on the model too, unless that is meant (ignored_params), or reduce its gradient",
        )


def _meta(subject: Subject) -> Iterator[Finding]:
    if found := [owned for owned in subject.parameters if owned.param.device.type == "meta"]:
        yield Finding(
            "meta parameter",
            tuple(owned.name for owned in found),
            "has no data yet: sharded as it is; the first forward is refused unless it has data by then",
            "handled",
            "behind compile: model.to_empty(device=...), then initialize it or load a checkpoint",
        )
    kept, lost = list[str](), list[str]()
    for place, module in subject.places():
        for name, buffer, persistent in own_buffers(module) if not isinstance(module, torch.jit.ScriptModule) else ():
            if buffer.device.type == "meta":
                (kept if persistent else lost).append(fsdp2.without_wrappers(f"{place}.{name}" if place else name))
    if kept:
        yield Finding(
            "meta buffer",
            tuple(kept),
            "has no data yet; a state dict has it",
            "handled",
            "behind compile: model.to_empty(device=...), then initialize it or load a checkpoint",
        )
    if lost:
        yield Finding(
            "non-persistent meta buffer",
            tuple(lost),
            "has no data yet, and no state dict has it: behind to_empty it is whatever the memory held, and no "
            "checkpoint brings it",
            "ignored",
            "compute it again behind to_empty, as the module's __init__ does",
        )


def _parameter_hooks(subject: Subject) -> Iterator[Finding]:
    plain = subject.state == "plain"
    on_grad, behind = list[str](), list[str]()
    for owned in subject.parameters:
        if owned.unit is not None:
            grads, accumulations = hooks_of_parameter(owned.param)
            (on_grad if grads or (plain and accumulations) else behind if accumulations else []).append(owned.name)
    if on_grad:
        yield Finding(
            "parameter hook",
            tuple(on_grad),
            "a hook of a parameter itself: sharding makes another parameter of it, and gradients do not come to that "
            "by autograd: FSDP2 never calls it",
            "ignored",
            "register_post_accumulate_grad_hook on the sharded parameter, behind compile",
        )
    if behind:
        yield Finding(
            "parameter hook", tuple(behind), "a hook behind the reduction of the sharded gradient: called", "handled"
        )
