"""What Python can see of a block: equal for blocks in which the same code does the same, with other tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle

from graphshard.capture.marked_classes import ENGINE, SHARD_PREFIX, shard_key
from graphshard.capture.parameters_in_forward import FORWARD
from graphshard.capture.twin_asking import TWIN_MARK

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout, type, BuiltinFunctionType)
# Tables of hooks, and of what is said of each by its key. Equal hooks have other keys.
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
# What every module has, and what no forward reads.
_STANDARD = {*vars(nn.Module()), ENGINE, FORWARD, TWIN_MARK} - {"training"}
_UNREAD_PREFIX = "__composable_api_state_key"


class Place:
    """Where a tensor of a block is found, whatever it is replaced by."""

    __slots__ = ("name", "table")

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self.table = table
        self.name = name

    def tensor(self) -> Tensor:
        """What is there now: a parameter's leaf, a buffer."""
        value = self.table[self.name]
        found: Tensor = value[0] if type(value) is tuple else value
        return found


class _Same:
    """Equal where it holds the same object."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class BlockState:
    """What is seen of one block now.

    Args:
        block: a module, with all that is inside it.

    Attributes:
        structure: classes, names, hooks, what parameters and buffers are like, all values but scalars of attributes.
        scalars: (attribute, value) of numbers, texts and None, in the order of the modules.
        places: of parameters and buffers, in that order. `structure` says which of a block's own are the same tensor.
        holds_tensors: outside of its parameters and buffers, where they are not looked for. It is like no other, then.
        objects: ids of what its attributes hold, which code may find elsewhere too and compare by ``is``.
    """

    def __init__(self, block: nn.Module) -> None:
        walk = _Walk(block)
        self.structure = tuple(walk.found)
        self.scalars = walk.scalars
        self.places = walk.places
        self.holds_tensors = walk.holds_tensors
        self.objects = frozenset(map(id, walk.objects))
        self._watched = walk.watched
        # It keeps no tensor alive that a block may drop.
        self._noted = (None, [], None) if self.holds_tensors else self._watched.now()

    def is_current(self) -> bool:
        """Whether nothing was set since. What happens inside objects that blocks share is not looked at: Dynamo guards
        it where it matters.
        """
        if self.holds_tensors:
            return True
        sizes, objects, traits = self._noted
        try:
            same = sizes == self._watched.sizes() and all(map(operator.is_, objects, self._watched.objects()))
        except KeyError:  # a name is gone
            return False
        return same and traits == self._watched.traits()

    def common(self, out: Container[int]) -> object:
        """The scalars but those at `out`."""
        return tuple(_scalar(value) for at, (_, value) in enumerate(self.scalars) if at not in out)


@dataclasses.dataclass
class _Watched:
    """What a walk has read, to be read again.

    Attributes:
        modules: whose classes count.
        sized: containers whose lengths count.
        tables: with what of each counts (`readers`).
        collections: each item of which counts.
        cells: of closures.
        functions: whose code and defaults count.
        plain: tensors that graphshard does not shard.
    """

    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    sized: list[Collection[Any]] = dataclasses.field(default_factory=list)
    tables: list[dict[Any, Any]] = dataclasses.field(default_factory=list)
    readers: list[Callable[[dict[Any, Any]], tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    collections: list[Collection[Any]] = dataclasses.field(default_factory=list)
    cells: list[CellType] = dataclasses.field(default_factory=list)
    functions: list[FunctionType] = dataclasses.field(default_factory=list)
    plain: list[Place] = dataclasses.field(default_factory=list)

    def watch(self, table: dict[Any, Any], keys: Iterable[Any]) -> None:
        """From now on what a table has at `keys` counts, and how much it has."""
        self.sized.append(table)
        if keys := list(keys):
            self.tables.append(table)
            self.readers.append(operator.itemgetter(*keys, keys[0]))  # of one key it would not make a tuple

    def now(self) -> tuple[object, list[object], object]:
        return self.sizes(), list(self.objects()), self.traits()

    def sizes(self) -> object:
        return [*map(len, self.sized), *map(len, self.collections), *map(type, self.modules)]

    def objects(self) -> Iterator[object]:
        read = map(operator.call, self.readers, self.tables)
        cells = map(_content, self.cells)
        return chain(chain.from_iterable(chain(read, self.collections, map(_PARTS, self.functions))), cells)

    def traits(self) -> object:
        return [_traits(place.tensor()) for place in self.plain]


class _Walk:
    """A walk over all that Python sees of a block."""

    def __init__(self, block: nn.Module) -> None:
        self._number = {id(module): number for number, module in enumerate(block.modules())}
        self._tensors: dict[int, int] = {}
        self.objects: list[object] = []
        self.found: list[object] = []
        self.scalars: list[tuple[str, object]] = []
        self.places: list[Place] = []
        self.holds_tensors = False
        self.watched = _Watched()
        self._see_module(block)

    def _see_module(self, module: nn.Module) -> None:
        if any(module is other for other in self.watched.modules):
            self.found.append(self._number[id(module)])
            return
        self.watched.modules.append(module)
        self.found.append(type(module))
        if isinstance(module, torch.jit.ScriptModule) or _has_slots(module):  # what is inside does not show
            self.found.append(_Same(module))
            return
        table = vars(module)
        parameters, buffers, children = table["_parameters"], table["_buffers"], table["_modules"]
        own = [name for name in table if name not in _STANDARD and not name.startswith(_UNREAD_PREFIX)]
        self.watched.watch(table, own)
        self.watched.watch(children, children)
        self.found.append(table["_is_full_backward_hook"])
        for name, flags in _HOOKS.items():  # watched by their keys
            for key, hook in table[name].items():
                self.found.append((name, *(key in table[flag] for flag in flags)))
                self._see(hook)
        for name in own:
            if name.startswith(SHARD_PREFIX):
                _, spec, more = table[name]
                self._see_tensor(Place(table, name), spec, more and more[0])
                if more and more[1]:  # what a tensor subclass does with another block is not known here
                    self.found.append(_Same(table[name][0]))
            else:
                self._see_attribute(name, table[name])
        for tensors in (parameters, buffers):
            self.watched.watch(tensors, [name for name in tensors if shard_key(name) not in table])
            for name in tensors:
                if tensors[name] is None:
                    self.found.append((name, None))
                elif shard_key(name) not in table:
                    self.watched.plain.append(Place(tensors, name))
                    self._see_tensor(self.watched.plain[-1])
        for name, child in children.items():
            self.found.append(name)
            if child is not None:
                self._see_module(child)

    def _see_tensor(self, place: Place, *described: object) -> None:
        tensor = place.tensor()
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        self.places.append(place)
        if isinstance(tensor, DTensor):
            described = (*described, _Same(tensor))  # a wrapper's own tensors are not known here
        self.found.append((place.name, number, described, _traits(tensor)))

    def _see_attribute(self, name: str, value: object) -> None:
        self.found.append(name)
        if type(value) in _SCALARS:
            self.found.append(type(value))
            self.scalars.append((name, value))
        else:
            self._see(value)

    def _see(self, value: Any) -> None:
        kind = type(value)
        if kind in _SCALARS:
            self.found.append(_scalar(value))
        elif kind in _PLAIN or isinstance(value, (Placement, DeviceMesh)):
            self.found.append((kind, value))
        elif isinstance(value, Tensor):
            self.holds_tensors = True
        elif any(value is other for other in self.objects):
            self.found.append(next(number for number, other in enumerate(self.objects) if other is value))
        else:
            self._see_object(value, kind)

    def _see_object(self, value: Any, kind: type) -> None:
        self.objects.append(value)
        if kind in (tuple, list):
            self.found.append((kind, len(value)))
            self.watched.collections.append(value)
            for item in value:
                self._see(item)
        elif kind is dict:
            self.found.append((kind, tuple(map(_hashable, value))))
            self.watched.watch(value, value)
            for item in value.values():
                self._see(item)
        elif kind in (set, frozenset):
            self.found.append(_hashable(value))
            self.watched.collections.append(value)
        elif kind is partial:
            self._see((value.func, value.args, value.keywords))
        elif kind is MethodType:
            self._see(value.__func__)
            self._see(value.__self__)
        elif kind is FunctionType and not vars(value):
            self.watched.functions.append(value)
            self.found.append((value.__code__, _Same(value.__globals__)))
            self._see((value.__defaults__, value.__kwdefaults__))
            for cell in value.__closure__ or ():
                self._see_cell(cell)
        elif isinstance(value, nn.Module):
            self.found.append(self._number.get(id(value), _Same(value)))
        elif _is_record(value):
            self.found.append(kind)
            self._see(vars(value))
        else:
            self.found.append(_Same(value))

    def _see_cell(self, cell: CellType) -> None:
        for number, other in enumerate(self.watched.cells):
            if cell is other:
                self.found.append(number)
                return
        self.watched.cells.append(cell)
        self._see(_content(cell))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return CellType


def _is_record(value: object) -> bool:
    is_one = isinstance(value, ParallelStyle) or dataclasses.is_dataclass(value)
    hidden = isinstance(value, (type, dict, list, tuple, set, frozenset, str, int, float)) or _has_slots(value)
    return is_one and not hidden and hasattr(value, "__dict__")


def _has_slots(value: object) -> bool:
    return any(vars(base).get("__slots__") for base in type(value).__mro__)


def _traits(tensor: Tensor) -> tuple[object, ...]:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return (_Same(tensor),)  # what else can be seen of it is not known here
    own = [(name, _hashable(value)) for name, value in vars(tensor).items()]
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, *own


def _hashable(key: Any) -> object:
    if type(key) in (set, frozenset):
        return type(key), frozenset(map(_hashable, key))
    return _scalar(key) if type(key) in _SCALARS else _Same(key)


def _scalar(value: Any) -> tuple[object, ...]:
    """Equal for values of one type and text: 0.0 is not -0.0."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def indices(states: Iterable[BlockState]) -> frozenset[int]:
    """Which scalars of blocks of one structure number or name the blocks: no two have the same."""
    columns = zip(*(state.scalars for state in states), strict=True)
    return frozenset(
        at
        for at, column in enumerate(columns)
        if all(type(value) in (int, str) for _, value in column) and len({value for _, value in column}) == len(column)
    )
