"""The shards of one model, by where they are looked for: by leaf, by unit, in the model's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from graphshard import fsdp2
from graphshard.capture import marked_classes
from graphshard.compat.interpreter import without_collection
from graphshard.compat.modules import own_parameters
from graphshard.compat.tensors import address
from graphshard.fsdp2 import AllGatherExtension, Unit
from graphshard.reporting.report import Report
from graphshard.state.binding import Binding
from graphshard.state.parameter_watch import ParameterWatch
from graphshard.state.shards import Shard

# So often may the metadata of one extension differ before the report says so.
MANY_KINDS = 8


def class_of(unit: Unit) -> str:
    """Name of the class of a unit's module, as users wrote it."""
    return marked_classes.own_class(type(unit.modules[0])).__name__.removeprefix("FSDP")


class ShardTable:
    """The shards of one model. They are made before its first call: parameters may be materialized until then.

    Args:
        model: annotated by `fully_shard` or `replicate`.
        units: its.
        report: its.

    Attributes:
        active: units of which some shard holds something, or did lately.
        grad_came: is called in a backward in which a gathered parameter gets a gradient from around the model.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], report: Report) -> None:
        self._model = model
        self._report = report
        self.units = units
        self._position = {unit: place for place, unit in enumerate(units)}
        self._of_module: dict[int, list[Unit]] = {}
        for unit in units:
            for module in unit.modules:
                self._of_module.setdefault(id(module), []).append(unit)
        self.active: set[Unit] = set()
        self.grad_came: Callable[[], None] = lambda: None
        self._shards: list[Shard] = []
        self._extended: list[tuple[Shard, AllGatherExtension]] = []
        self._of_unit: dict[Unit, list[Shard]] = {}
        self._at: dict[int, Shard] = {}
        self._bindings: dict[tuple[int, str, tuple[int, ...]], Binding] = {}
        self._watch: ParameterWatch | None = None
        self._inside: dict[int, list[tuple[dict[str, Any], str, Shard]]] = {}

    def refresh(self) -> bool:
        """Makes the shards, or new leaves for parameters that have changed; returns whether any is new.

        Raises:
            RuntimeError: a parameter was replaced in its module, or changed while an unreduced gradient was held.
        """
        if self._watch is None:
            self._make_shards()
        elif self._watch.changed():
            for shard in self._shards:
                shard.renew()
        else:
            return False
        self._watch = ParameterWatch(self._shards)
        self._inside.clear()
        self._bindings.clear()  # addresses mean nothing any more
        self._at = self._addresses()
        for shard in self._shards:
            self._show(shard)
        return True

    @without_collection()
    def _make_shards(self) -> None:
        fsdp2.lazy_init(self._model)
        units = [unit for unit in self.units if unit.params]
        for unit, params in fsdp2.named_units(self._model, units):
            named = enumerate(params.items())
            self._of_unit[unit] = [Shard(param, unit, fqn, index, self._report) for index, (fqn, param) in named]
        self._shards = [shard for own in self._of_unit.values() for shard in own]
        for shard in self._shards:
            shard.grad_came = self._grad_came
        self._extended = [(shard, own) for shard in self._shards if (own := shard.extension) is not None]

    def _grad_came(self, shard: Shard) -> None:
        self.active.add(shard.unit)
        self.grad_came()

    def check_registered(self) -> None:
        """Raises:
        RuntimeError: a parameter was replaced in its module.
        """
        if self._watch is not None:
            self._watch.changed()

    def has_other_values(self, module: nn.Module) -> bool:
        """Whether something else is in the place of a parameter inside `module` now, as `functional_call` puts it."""
        if (inside := self._inside.get(id(module))) is None:
            tables = {id(own_parameters(part)) for part in module.modules()}
            places = ((table, name, shard) for shard in self._shards for table, name in shard.param.places)
            inside = self._inside[id(module)] = [place for place in places if id(place[0]) in tables]
        found = any(_is_other(shard, table.get(name)) for table, name, shard in inside)
        if found:
            self.say_other_values()
        return found

    def say_other_values(self) -> None:
        """Says that a module is called so."""
        self._report.say_once(
            "forward calls a module with other values than its parameters (torch.func.functional_call, a "
            "parametrization that it registers): it and the code around it run as they are; other modules are compiled"
        )

    def some_taken_out(self) -> bool:
        """Whether a parameter is out of its module now, as while a parametrization that forward registers is there."""
        return any(table.get(name) is None for shard in self._shards for table, name in shard.param.places)

    def other_value(self, shard: Shard, module: nn.Module, name: str) -> Tensor | None:
        """What stands in the place of a parameter now; None: it does itself."""
        found = own_parameters(module).get(name)
        return found if _is_other(shard, found) else None

    def _addresses(self) -> dict[int, Shard]:
        return {address(shard.leaf): shard for shard in self._shards}

    def refresh_extensions(self, is_under_way: Callable[[Unit], bool]) -> None:
        """Asks tensor subclasses what to send of what is not gathered yet, nor under way. All ranks come here together:
        they may communicate for it.
        """
        for shard, extension in self._extended:
            gathered = shard.full is not None and not shard.is_outdated()
            if gathered or is_under_way(shard.unit):
                continue
            if extension.refresh(shard.written()):
                self._show(shard)
                if extension.kinds == MANY_KINDS:
                    self._report.say_once(
                        f"{shard.fqn}: the metadata of its all-gather extension has differed {MANY_KINDS} times, and "
                        "each is compiled anew; want what changes to be a tensor"
                    )

    def check_sent(self, shards: Iterable[Shard]) -> None:
        """Raises:
        RuntimeError: a backward is to gather what a tensor subclass has sent of a parameter, which was written since.
        """
        for shard in shards if self._extended else ():
            if (own := shard.extension) is not None and shard.full is None and own.is_of != shard.written():
                raise RuntimeError(
                    f"{shard.fqn}: it was written between a forward and its backward, for which its all-gather "
                    "extension sends what forward had, not, as FSDP2, what is there now; want the write behind the "
                    "backward, or both in graphshard.eager(model)"
                )

    def _show(self, shard: Shard) -> None:
        """Puts a leaf where properties of marked modules find it."""
        for module, name in shard.param.owners:
            module.__dict__[marked_classes.shard_key(name)] = shard.marker_args()

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._of_unit

    def of(self, unit: Unit) -> Sequence[Shard]:
        """All shards of a unit."""
        return self._of_unit.get(unit, ())

    def by_unit(self) -> Iterable[tuple[Unit, Sequence[Shard]]]:
        """Each unit that has shards, in the model's order, with these."""
        return self._of_unit.items()

    def in_order(self, units: frozenset[Unit]) -> list[Unit]:
        """The model's order, which is the same on every rank; that of a set is not."""
        return sorted((unit for unit in units if unit in self._of_unit), key=self._position.__getitem__)

    def unit_named(self, name: str) -> Unit:
        """The unit of that name."""
        return next(unit for unit in self._of_unit if unit.name == name)

    def units_of(self, module: nn.Module) -> list[Unit]:
        """Units that `module` is of."""
        return self._of_module.get(id(module), [])

    def is_whole(self, units: frozenset[Unit]) -> bool:
        """Whether `units` are all of the model's that have parameters."""
        return units.issuperset(unit for unit in self.units if unit.params)

    def at(self, leaf: Tensor) -> Shard:
        """The shard of a leaf, or of what shares its memory."""
        return self._at[address(leaf)]

    def alone(self, shard: Shard) -> Binding:
        """One shard, as a read outside any graph brings it."""
        return self.bind(-1, "read", (shard.leaf,))

    def bind(self, region: int, direction: str, leaves: Iterable[Tensor]) -> Binding:
        """The shards that a call of a region brings. `leaves`: in slot order."""
        addresses = tuple(address(leaf) for leaf in leaves)
        key = (region, direction, addresses)
        if (binding := self._bindings.get(key)) is None:
            binding = self._bindings[key] = Binding(tuple(self._at[address] for address in addresses))
        return binding


def _is_other(shard: Shard, found: object) -> bool:
    return found is not shard.param.parameter and not shard.is_registered(found)
