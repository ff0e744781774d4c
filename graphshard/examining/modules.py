"""What is found in modules, by looking at them."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from graphshard import fsdp2
from graphshard.capture.marked_classes import own_class
from graphshard.capture.units import blocks_left
from graphshard.compat.dynamo import is_compiled_module
from graphshard.compat.modules import has_backward_hooks_of_all_modules, kinds_of_hooks
from graphshard.examining.diagnosis import Finding
from graphshard.examining.subject import Subject

_MOST_DEPTH = 3


def module_findings(subject: Subject) -> Iterator[Finding]:
    """Findings of a model's modules."""
    found: dict[tuple[str, str, str, str], list[str]] = collections.defaultdict(list)
    fsdp_keys = fsdp2.hook_keys(subject.model)
    registered = {id(module) for module in subject.model.modules()}
    parameters = {id(param) for param in subject.model.parameters()}
    for name, module in subject.places():
        place = fsdp2.without_wrappers(name)
        if isinstance(module, torch.jit.ScriptModule):
            if next(module.parameters(), None) is None:
                found[_SCRIPTED].append(place)
            continue
        if isinstance(module, nn.RNNBase):
            found[_RECURRENT].append(place)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            found[_SPARSE].append(place)
        if parametrize.is_parametrized(module):
            found[_PARAMETRIZED].append(place)
        if is_compiled_module(module):
            found[_COMPILED].append(place)
        if fsdp2.own_class(own_class(type(module))).named_parameters is not nn.Module.named_parameters:
            found[_OWN_NAMES].append(place)
        for kind in kinds_of_hooks(module, fsdp_keys):
            found[_FORWARD_HOOK if kind == "forward" else _BACKWARD_HOOK].append(place)
        for key, value in _held(module):
            where = f"{place}.{key}" if place else key
            if isinstance(value, nn.Module):
                if id(value) not in registered and next(value.parameters(), None) is not None:
                    found[_UNREGISTERED].append(where)
            elif id(value) in parameters or isinstance(value, nn.Parameter):
                plain, inside = subject.state == "plain", id(value) in parameters
                if plain or not inside:  # a list of shards is as good as what parameters() yields
                    found[_KEPT_LIST if plain is inside else _UNREGISTERED].append(where)
            elif value.requires_grad and value.is_leaf:
                found[_UNREGISTERED].append(where)
    if has_backward_hooks_of_all_modules():
        found[_BACKWARD_HOOK].append("every module")
    for (kind, what, verdict, to_do), names in found.items():
        yield Finding(kind, tuple(dict.fromkeys(names)), what, verdict, to_do)


def shared_findings(subject: Subject) -> Iterator[Finding]:
    """Blocks that are no units because of what they share."""
    if left := blocks_left(subject.model):
        shared = sorted({name for names in left.values() for name in names})
        yield Finding(
            "shared by blocks",
            tuple(left),
            f"blocks that share {', '.join(shared[:3])}{', ...' if len(shared) > 3 else ''} with others stay with the "
            "root, gathered and freed with it",
            "handled",
            "if they are large: name units= that hold what is shared in all its places, such as the shared module",
        )


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors and modules that a module keeps in attributes of its own, in containers too, by the attribute."""
    for key, value in vars(module).items():
        if not key.startswith(_TABLES):
            for found in _inside(value, _MOST_DEPTH if not (isinstance(module, nn.RNNBase) and "flat" in key) else 0):
                yield key, found


# Of nn.Module's own, FSDP2's and graphshard's.
_TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_", "_backward_", "_state_dict_", "_load_state_dict_",
    "_non_persistent_", "_graphshard_", "__composable", "_is_full_", "_is_fsdp_", "_fsdp_",
)  # fmt: skip


def _inside(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (Tensor, nn.Module)):
        if depth:
            yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _inside(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for item in value:
            yield from _inside(item, depth - 1)


_RECURRENT = (
    "recurrent",
    "keeps a list of its parameters, and no graph traces it: its whole unit is gathered and reduced outside the graphs",
    "eager",
    "make it a unit of its own, with units=, so that nothing else is gathered with it",
)
_SCRIPTED = (
    "script module",
    "TorchScript's, without parameters: called as it is, from the graph or, where Dynamo cannot, at a graph break",
    "handled",
    "",
)
_SPARSE = (
    "sparse gradient",
    "sparse=True gives gradients that are sparse tensors, which neither FSDP2 nor graphshard reduces: the first "
    "training step fails",
    "refused",
    "want sparse=False",
)
_PARAMETRIZED = (
    "parametrization",
    "computed from other parameters: these are sharded, and what is made of them is part of the graph",
    "handled",
    "",
)
_COMPILED = (
    "compiled inside",
    "was compiled by torch.compile itself: a graph break around it, and graphs of its own"
    if torch.__version__ >= "2.12"
    else "was compiled by torch.compile itself, which Dynamo of torch 2.11 cannot trace: the first forward fails",
    "eager" if torch.__version__ >= "2.12" else "refused",
    "leave out that torch.compile: one graph covers it",
)
_OWN_NAMES = (
    "own named_parameters",
    "has a named_parameters of its own, and so parameters(): asked in a forward it yields shards, where FSDP2 has "
    "gathered parameters",
    "handled",
    "read parameters by their names in forward",
)
_FORWARD_HOOK = ("forward hook", "traced with the module's forward", "handled", "")
_BACKWARD_HOOK = (
    "backward hook",
    "traced with the module's call; where Dynamo breaks the graph at it, that is one of the graph breaks",
    "handled",
    "give sample arguments to see whether it does",
)
_UNREGISTERED = (
    "not registered",
    "no parameter of the model to PyTorch: neither sharded, nor reduced, nor in parameters() or a state dict",
    "ignored",
    "hold it in an attribute, nn.ModuleList, nn.ParameterList or nn.ModuleDict",
)
_KEPT_LIST = (
    "own parameter list",
    "keeps a parameter beside its registered place: sharding registers another one, and what is kept stays what it "
    "was, is not trained and gets its own gradient",
    "ignored",
    "read the parameter by its attribute",
)
