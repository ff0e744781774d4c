"""Units found from the structure of a model: blocks in containers, never names."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from torch import nn

# What is beside blocks is one, too, unless the largest of them has more than so many times its elements.
_SMALL = 100
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded as units of their own, outermost blocks; what is left belongs to the root.

    Children of one container (`ModuleList`, `Sequential`, `ModuleDict`) are blocks where they are of one class and have
    equal parameter shapes, dtypes and `requires_grad`. So are, where they consist of modules themselves: others of that
    class; children of one class in any shape, but for stages, which hold equal blocks that do; and beside such blocks
    whatever is no stage, and not small. A block that shares a parameter, or a module that has some, with the rest of
    the model stays with the root: two units cannot own one parameter.
    """
    return [unit.module for unit in units_found(model)]


@dataclass(frozen=True)
class FoundUnit:
    """A module that is to be a unit.

    Attributes:
        module: the unit.
        place: FQN of the container that holds it.
        why: it is a block: a few words.
    """

    module: nn.Module
    place: str
    why: str


def units_found(model: nn.Module) -> list[FoundUnit]:
    """What `find_units` finds, and why."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_units: model: got {type(model).__name__}, want an nn.Module")
    return list(_found(model, "", _owner_counts(model), set()))


def said_of_units(found: Sequence[FoundUnit]) -> list[str]:
    """Units by container, class and reason, one line for each."""
    counts = Counter((unit.place or "the model", type(unit.module).__name__, unit.why) for unit in found)
    said = [f"units in {place}: {count} {name}, {why}" for (place, name, why), count in counts.items()]
    return said or ["units: none, as no container of the model holds blocks: all of it is one; `units` names others"]


def blocks_left(model: nn.Module) -> dict[str, list[str]]:
    """FQN of each block that is no unit, since it shares something -> FQNs of what it shares."""
    owners, left = _owner_counts(model), list[nn.Module]()
    for _ in _found(model, "", owners, set(), left):
        pass
    names = {id(module): name for name, module in model.named_modules()}
    names |= {id(param): name for name, param in model.named_parameters()}
    return {names[id(block)]: sorted(names[key] for key in _shared(block, owners)) for block in left}


def _found(
    module: nn.Module, place: str, owners: dict[int, int], seen: set[int], left: list[nn.Module] | None = None
) -> Iterator[FoundUnit]:
    """Units below `module`; `left` gets blocks that are none."""
    blocks = _blocks(module) if isinstance(module, _CONTAINERS) else {}
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if id(child) in blocks and not _shared(child, owners):
            yield FoundUnit(child, place, blocks[id(child)])
            continue
        if id(child) in blocks and left is not None:
            left.append(child)
        yield from _found(child, f"{place}.{name}" if place else name, owners, seen, left)


def _blocks(container: nn.Module) -> dict[int, str]:
    """Ids of children that are blocks, each with why it is one."""
    kinds: dict[object, list[nn.Module]] = defaultdict(list)
    for child in container.children():  # a child registered twice counts once
        if (kind := _kind(child)) is not None:
            kinds[kind].append(child)
    equal = [child for siblings in kinds.values() if len(siblings) > 1 for child in siblings]
    blocks = {id(child): "equal blocks" for child in equal}
    others = [child for siblings in kinds.values() for child in siblings if id(child) not in blocks]
    others = [child for child in others if _is_composite(child)]
    classes = {type(child) for child in equal if _is_composite(child)}
    blocks.update({id(child): "of the class of equal blocks" for child in others if type(child) in classes})
    others = [child for child in others if id(child) not in blocks and not _is_stage(child)]
    counts = Counter(map(type, others))
    blocks.update({id(child): "blocks of one class" for child in others if counts[type(child)] > 1})
    found = [child for child in container.children() if id(child) in blocks and _is_composite(child)]
    least = max(map(_numel, found), default=math.inf) / _SMALL
    beside = (child for child in others if id(child) not in blocks and _numel(child) >= least)
    return blocks | {id(child): "beside blocks" for child in beside}


def _is_stage(module: nn.Module) -> bool:
    """Whether a module holds equal blocks that consist of modules themselves."""
    for container in module.modules():
        if isinstance(container, _CONTAINERS):
            kinds = Counter(_kind(child) for child in container.children() if _is_composite(child))
            if any(count > 1 for kind, count in kinds.items() if kind is not None):
                return True
    return False


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _kind(module: nn.Module) -> object:
    """What makes two siblings equal blocks; None without parameters, or without a forward to hang a unit on."""
    if not _has_forward(module):
        return None
    shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
    return (type(module), shapes) if shapes else None


def _has_forward(module: nn.Module) -> bool:
    """Whether the class of a module has a forward of its own; one of TorchScript's would look it up on an instance."""
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _is_composite(module: nn.Module) -> bool:
    """Whether a module consists of others that have parameters: single layers of any shape are no blocks."""
    return any(True for child in module.children() for _ in child.parameters())


def _owner_counts(module: nn.Module, apart: Set[object] = frozenset()) -> dict[int, int]:
    """How many (module, name) places hold each parameter, and each child that has some.

    Args:
        module: to look at, with all that is in it.
        apart: modules and parameters that do not count.
    """
    counts: dict[int, int] = defaultdict(int)
    for submodule in _walk(module, apart):
        for _, param in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if param not in apart:
                counts[id(param)] += 1
        for child in submodule.children():
            if child not in apart and any(param not in apart for param in child.parameters()):
                counts[id(child)] += 1
    return counts


def _walk(module: nn.Module, apart: Set[object]) -> Iterator[nn.Module]:
    seen, left = {module}, [module]
    while left:
        yield (found := left.pop())
        inner = [child for child in found.children() if child not in seen and child not in apart]
        seen.update(inner)
        left += inner


def _shared(module: nn.Module, owners: dict[int, int], apart: Set[object] = frozenset()) -> set[int]:
    """Ids of what `module` holds and something outside of it, too."""
    return {key for key, count in _owner_counts(module, apart).items() if count != owners[key]}


def _check_closed(model: nn.Module, units: Sequence[nn.Module], ignored: Set[nn.Parameter]) -> None:
    """Refuses a unit that shares a parameter; a unit inside it that does not has its own."""
    owners = _owner_counts(model, ignored)
    for unit in units:
        if shared := _shared(unit, owners, {*units, *ignored} - {unit}):
            own = [param for param in unit.parameters() if id(param) in shared]
            param = (own or [next(child.parameters()) for child in unit.modules() if id(child) in shared])[0]
            names = [name for name, found in model.named_parameters(remove_duplicate=False) if found is param]
            unit_name = next(name for name, found in model.named_modules() if found is unit)
            raise ValueError(
                f"compile: units: '{unit_name}' shares a parameter with modules outside of it, known as "
                f"{', '.join(map(repr, names))}; two units cannot own one parameter: want units that hold it in all "
                "its places, or the module that is shared as a unit of its own"
            )


def parameters_of_units(
    model: nn.Module, units: Sequence[nn.Module], ignored: Set[nn.Parameter] = frozenset()
) -> list[dict[str, nn.Parameter]]:
    """By FQN, what `fully_shard` will give to each of `units`, called in this order: what no unit before has."""
    names: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        names[param] = name
    taken: set[object] = set(ignored)
    found = []
    for unit in units:
        inside = list(_walk(unit, taken))
        own = {p: names[p] for module in inside for p in module.parameters(recurse=False) if p not in taken}
        taken.update(own, inside)
        found.append({name: param for param, name in own.items()})
    return found


def resolve_units(
    model: nn.Module,
    units: Sequence[str | type[nn.Module] | nn.Module] | None,
    ignored: Set[nn.Parameter] = frozenset(),
) -> list[nn.Module]:
    """Modules for the `units` argument of `compile`: None finds them; else FQNs, classes or the modules themselves.

    Args:
        model: to look in.
        units: as of `compile`.
        ignored: parameters that no unit owns.

    Raises:
        ValueError: for an FQN or a module that the model does not have, or a class that it has no module of, or for
            modules of which one shares a parameter with what is outside of it.
        TypeError: for anything else.
    """
    if units is None:
        return find_units(model)
    if isinstance(units, (str, type, nn.Module)) or not isinstance(units, Iterable):
        raise TypeError(f"compile: units: got {units!r}, want a list, such as ['layers.0'] or [Block]")
    modules = dict(model.named_modules())
    chosen: dict[int, nn.Module] = {}
    for unit in units:
        if isinstance(unit, str):
            found = [modules[unit]] if unit in modules else []
        elif isinstance(unit, type) and issubclass(unit, nn.Module):
            found = [module for module in modules.values() if isinstance(module, unit)]
        elif isinstance(unit, nn.Module):
            found = [module for module in modules.values() if module is unit]
        else:
            raise TypeError(f"compile: units: got {unit!r}, want FQNs, module classes or modules")
        if not found:
            raise ValueError(
                f"compile: units: got {unit!r}, want modules of {type(model).__name__}; see named_modules()"
            )
        for module in found:
            if module is not model and not _has_forward(module):
                raise ValueError(
                    f"compile: units: got {unit!r}, a {type(module).__name__}, which has no forward; name what is in it"
                )
        chosen.update((id(module), module) for module in found if module is not model)
    # Inner units first: fully_shard takes what no earlier call has taken.
    inner_first = [module for module in _inner_first(model, set()) if id(module) in chosen]
    _check_closed(model, inner_first, ignored)
    return inner_first


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules, each behind those in it, the last ones first."""
    seen.add(module)
    for child in reversed(list(module.children())):
        if child not in seen:
            yield from _inner_first(child, seen)
    yield module
