"""What can be asked of Dynamo while it traces: it keeps its state of a trace private."""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Hashable, Mapping, Set
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator, tls
from torch._dynamo.utils import get_metrics_context
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationExisting
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import TracingContext

# What Dynamo puts around a guard that failed: the number of what was captured before, advice.
_CAPTURE, _HINT = re.compile(r"^\d+/\d+: "), re.compile(r"\(HINT: .*\)$")
# Where a module keeps another, and the shard of a parameter.
_INNER = re.compile(r"\._modules\['(\w+)'\]|\.?__dict__\['_graphshard_shard_(\w+)'\](?:\[0\])?")
# Our own code says nothing about a user's.
_OWN_CODE = re.compile(r"\bgraphshard/(capture|compat|fsdp2|runtime|state)/\w+\.py:")


def surrounding_graph() -> str | None:
    """Where Dynamo puts nodes now: "captured", the graph that a backend gets; "checkpoint", that of a checkpoint in it;
    None: another graph inside.
    """
    tracer = InstructionTranslator.current_tx().output.current_tracer
    if tracer.parent is None:
        return "captured"
    of_checkpoint = tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint
    return "checkpoint" if of_checkpoint and tracer.parent.parent is None else None


def traced_code() -> CodeType:
    """Of the frame whose graph Dynamo makes now: where it went on behind a graph break, code of its own."""
    code: CodeType = InstructionTranslator.current_tx().f_code
    return code


def failed_guard() -> str:
    """Which guard of what was captured of this frame before failed, and the user's code that needs it, if Dynamo says
    them; ``""``: it captures the frame for the first time.
    """
    metrics: dict[str, Any] = getattr(get_metrics_context(), "_metrics", {})
    told = str(metrics.get("recompile_reason") or "").partition("\n")[0]
    guard, *comments = (part.strip() for part in _HINT.sub("", _CAPTURE.sub("", told)).split("  #"))
    code = next((part for part in reversed(comments) if part and not _OWN_CODE.search(part)), "")
    guard = _INNER.sub(lambda found: f".{found[1] or found[2]}", guard)
    return f"{guard} ({code})" if code else guard


def in_functional_call() -> bool:
    """Whether Dynamo traces a call of a module with values in the place of its parameters."""
    tx: InstructionTranslator | None = getattr(tls, "current_tx", None)
    return tx is not None and bool(tx.output.side_effects.ignore_mutation_on_these_variables)


# Traces in which a parameter was read in such a call.
_reads_in_functional_call: weakref.WeakSet[Any] = weakref.WeakSet()


def note_read() -> None:
    """A parameter is read where Dynamo traces, if it does."""
    if in_functional_call():
        _reads_in_functional_call.add(TracingContext.get())


def has_read_in_functional_call() -> bool:
    """Whether `note_read` was called inside one, in the trace that is made now."""
    return TracingContext.get() in _reads_in_functional_call


def ambient_modes() -> tuple[Hashable, ...]:
    """What changes operators around where Dynamo traces: gradients, inference mode, autocast, function modes; and
    whether values stand in the place of parameters.
    """
    autocast = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
    )
    functions = InstructionTranslator.current_tx().symbolic_torch_function_state
    return (
        *autocast,
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        functions.torch_function_subclass_enabled,
        functions.torch_function_mode_enabled,
        in_functional_call(),
        *map(id, functions.mode_stack),
    )


class Changes:
    """What the code that Dynamo has traced so far changes of objects that were there before, of tensors and of globals.
    Equal as long as nothing else is; to nothing, once it cannot be told. Objects whose class has `is_put_back` do not
    count.

    Attributes:
        tensors: ids of the fake values of tensors that such objects hold now.
    """

    def __init__(self) -> None:
        effects = InstructionTranslator.current_tx().output.side_effects
        variables: list[Any] = list(effects.id_to_variable.values())
        # Of a list, say, it is known that it is changed, not when. What is made in the trace is reached from these.
        self._unknown = any(map(_is_changed_container, variables))
        self._hooks = len(effects.tensor_hooks)
        self._stored: dict[tuple[int, str], list[object]] = {}
        self.tensors: set[int] = set()
        stored: dict[Any, Any] = effects.store_attr_mutations
        for variable, values in stored.items():
            if getattr(type(getattr(variable, "value", None)), "is_put_back", False):
                continue
            there = not isinstance(variable.mutation_type, AttributeMutationNew)
            if there or isinstance(variable, (TensorVariable, NewGlobalVariable)):
                for name, value in values.items():
                    self._stored[id(variable), name] = self._seen(value)

    def _seen(self, value: Any) -> list[object]:
        """A value by reference, with what is in it: of a dict that is kept, say, items may be set."""
        seen: list[object] = [weakref.ref(value)]
        if type(value) is ConstDictVariable:
            keys: list[Any] = [key.vt for key in value.items]
            for item in (*keys, *value.items.values()):
                seen += self._seen(item)
        elif type(value) in (ListVariable, TupleVariable):
            for item in value.items:
                seen += self._seen(item)
        elif isinstance(value, TensorVariable):
            self.tensors.add(id(value.as_proxy().node.meta.get("example_value")))
        else:
            self._unknown |= not isinstance(value, (ConstantVariable, SymNodeVariable))
        return [*seen, len(seen)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Changes) or self._unknown or other._unknown or self._hooks != other._hooks:
            return False
        if self._stored.keys() != other._stored.keys():
            return False
        pairs = ((seen, other._stored[key]) for key, seen in self._stored.items())
        return all(len(a) == len(b) and all(map(_is_same, a, b)) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def graph_inputs() -> dict[int, int]:
    """Numbers of the inputs that the captured graph has by now, by the ids of their fake values."""
    placeholders = InstructionTranslator.current_tx().output.root_tracer.graph.find_nodes(op="placeholder")
    return {id(node.meta.get("example_value")): number for number, node in enumerate(placeholders)}


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is b() is not None
    return a == b


def _is_changed_container(variable: Any) -> bool:
    if isinstance(variable, UserDefinedObjectVariable):
        if isinstance(variable.mutation_type, AttributeMutationNew):
            return False
        effects = InstructionTranslator.current_tx().output.side_effects
        names = ("is_base_vt_modified", "is_underlying_vt_modified")  # the latter before torch 2.12
        changed: bool = next(getattr(variable, name) for name in names if hasattr(variable, name))(effects)
        return changed
    return isinstance(variable.mutation_type, ValueMutationExisting) and variable.mutation_type.is_modified


def guarded_names() -> list[str]:
    """What Dynamo has guarded so far: expressions of Python."""
    return [_name_of(guard) for guard in TracingContext.get().guards_context.dynamo_guards]


def has_met(ids: Set[int]) -> bool:
    """Whether the code that Dynamo has traced has met a tensor, list, dict or other object that can change.

    Args:
        ids: of such objects.
    """
    output = InstructionTranslator.current_tx().output
    # Tensors are in the first since torch 2.12.
    return not ids.isdisjoint(output.side_effects.id_to_variable) or not ids.isdisjoint(
        output.tracked_fakes_id_to_source
    )


def reads_identities(modules: Mapping[int, Collection[str]]) -> bool:
    """Whether the code that Dynamo has traced looks at which module is which, as by `id(self)` or `self in blocks`.

    Args:
        modules: the names that modules have where they are, by their ids.
    """
    variables = InstructionTranslator.current_tx().output.side_effects.id_to_variable
    for key, names in modules.items():
        source = getattr(variables.get(key), "source", None)
        if source is not None and _module_name(source) not in names:
            return True  # it was met elsewhere than where it is
    for guard in TracingContext.get().guards_context.dynamo_guards:
        function: Any = guard.create_fn
        arguments: dict[str, Any] = getattr(function, "keywords", {})
        kind = getattr(function, "func", function).__name__
        compared: list[Any] = [guard, *arguments.values()] if kind in ("ID_MATCH", "DUPLICATE_INPUT") else []
        if any(_module_name(named) is not None for named in compared):
            return True
    return False


def _module_name(named: Any) -> str | None:
    """Of what Dynamo reads from where modules have their children: the child's name; of what it calls, ""."""
    name = _name_of(named)
    found = re.search(r"(\._modules|\['_modules'\])\['([^']*)'\]$", name)
    return found.group(2) if found else "" if name == "L['module']" else None


def _name_of(named: Any) -> str:
    name: Any = named.name  # a method in some versions
    text: str = name() if callable(name) else name
    return text


def trace_again() -> NoReturn:
    """In a backend: has Dynamo trace the frame again, as if it had just met it."""
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="graphshard: blocks are not alike")
