"""Units come from the structure of a model: blocks in containers, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphshard.capture.units import find_units, resolve_units, said_of_units, units_found


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class OtherBlock(Block):
    pass


class Model(nn.Module):
    """Has an embedding, blocks and a head; the blocks are what a test gives."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = blocks
        self.head = nn.Linear(4, 8, bias=False)


def names(model: nn.Module, units: list[nn.Module]) -> list[str]:
    """FQNs of `units`, in their order."""
    fqns = {id(module): name for name, module in model.named_modules()}
    return [fqns[id(unit)] for unit in units]


def found(blocks: nn.Module) -> list[str]:
    model = Model(blocks)
    return names(model, find_units(model))


@pytest.mark.parametrize(
    "container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)], ids=["list", "sequential"]
)
def test_units_are_the_blocks_of_a_container(container: Callable[[list[nn.Module]], nn.Module]) -> None:
    assert found(container([Block() for _ in range(3)])) == ["blocks.0", "blocks.1", "blocks.2"]


def test_units_are_the_values_of_a_dict() -> None:
    assert found(nn.ModuleDict({"first": Block(), "last": Block()})) == ["blocks.first", "blocks.last"]


def test_units_keep_the_order_of_the_model() -> None:
    model = nn.ModuleDict({"z": nn.ModuleList([Block(), Block()]), "a": nn.ModuleList([Block(8), Block(8)])})
    assert names(model, find_units(model)) == ["z.0", "z.1", "a.0", "a.1"]


@pytest.mark.parametrize("name", ["layers", "h", "x1", "norm"])
def test_units_do_not_depend_on_names(name: str) -> None:
    model = nn.Module()
    model.add_module(name, nn.ModuleList([Block(), Block()]))
    assert names(model, find_units(model)) == [f"{name}.0", f"{name}.1"]


def test_units_need_two_blocks() -> None:
    assert found(nn.ModuleList([Block()])) == []
    assert found(nn.ModuleList([])) == []
    assert found(nn.ModuleList([Block(4), OtherBlock(4)])) == []


def reasons(model: nn.Module) -> list[str]:
    return said_of_units(units_found(model))


def test_blocks_of_one_class_are_units_in_any_shape() -> None:
    model = Model(nn.ModuleList([Block(4), Block(8), Block(16).requires_grad_(False), Block().to(torch.bfloat16)]))
    assert names(model, find_units(model)) == [f"blocks.{i}" for i in range(4)]
    assert reasons(model) == ["units in blocks: 4 Block, blocks of one class"]


def test_a_block_with_a_parameter_more_is_a_unit() -> None:
    model = Model(nn.ModuleList([Block(), Block(), Block()]))
    model.blocks[0].bias = nn.Parameter(torch.zeros(4))
    assert names(model, find_units(model)) == [f"blocks.{i}" for i in range(3)]
    assert reasons(model) == [
        "units in blocks: 1 Block, of the class of equal blocks",
        "units in blocks: 2 Block, equal blocks",
    ]


def test_blocks_of_other_classes_beside_blocks_are_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OtherBlock(), Block(), Block(), nn.LayerNorm(4))
    assert names(model, find_units(model)) == ["1", "2", "3"]
    assert reasons(model) == [
        "units in the model: 1 OtherBlock, beside blocks",
        "units in the model: 2 Block, equal blocks",
    ]


def test_blocks_that_hold_unlike_ones_are_units() -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(Block(width), Block(2 * width), nn.Linear(2 * width, width))

    assert found(nn.Sequential(block(4), block(8), block(16))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_what_is_small_beside_blocks_is_no_unit() -> None:
    model = Model(nn.Sequential(OtherBlock(4), Block(64), Block(64), nn.Sequential(Block(16))))
    assert names(model, find_units(model)) == ["blocks.1", "blocks.2", "blocks.3"]


def test_a_model_of_one_unit_says_so() -> None:
    (line,) = reasons(Model(nn.ModuleList([Block()])))
    assert line.startswith("units: none") and line.endswith("`units` names others")


def test_single_layers_of_other_shapes_are_no_units() -> None:
    assert found(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))) == []
    assert found(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))) == ["blocks.0", "blocks.1"]


def test_units_of_unlike_stages_are_their_blocks() -> None:
    stages = nn.Sequential(*(nn.Sequential(Block(width), Block(width)) for width in (4, 8)), Block(8))
    assert found(stages) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def test_units_need_parameters() -> None:
    assert found(nn.ModuleList([nn.ReLU(), nn.ReLU()])) == []


def test_units_need_a_container() -> None:
    model = nn.Module()
    model.first, model.second = Block(), Block()
    assert find_units(model) == []


def test_units_are_the_outermost_blocks() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[1](self.inner[0](x))

    assert found(nn.ModuleList([Stack(), Stack()])) == ["blocks.0", "blocks.1"]
    assert found(nn.ModuleList([Stack()])) == ["blocks.0.inner.0", "blocks.0.inner.1"]


class Holder(nn.Module):
    """Has no forward of its own: its owner calls what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])


# FSDP2 refuses a list or a dict as a unit, and hooks of a module that is never called would not run.


def test_units_of_nested_lists_are_their_blocks() -> None:
    blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
    assert found(blocks) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def test_units_of_unlike_nested_lists_are_their_blocks() -> None:
    blocks = nn.ModuleList([nn.ModuleList([Block(width), Block(width)]) for width in (4, 8)])
    assert found(blocks) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def test_units_of_nested_dicts_are_their_blocks() -> None:
    blocks = nn.ModuleDict({side: nn.ModuleDict({"a": Block(), "b": Block()}) for side in ("left", "right")})
    assert found(blocks) == ["blocks.left.a", "blocks.left.b", "blocks.right.a", "blocks.right.b"]


def test_units_have_a_forward() -> None:
    assert found(nn.ModuleList([Holder(), Holder()])) == [f"blocks.{i}.inner.{j}" for i in range(2) for j in range(2)]


def test_units_leave_a_shared_parameter_to_the_root() -> None:
    blocks = nn.ModuleList([Block(), Block(), Block()])
    blocks[0].linear.weight = blocks[2].linear.weight
    assert found(blocks) == ["blocks.1"]


def test_units_leave_a_parameter_tied_to_the_head_to_the_root() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.head.weight = model.blocks[1].linear.weight
    assert names(model, find_units(model)) == ["blocks.0"]


def test_units_may_tie_parameters_inside() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    for block in blocks:
        block.norm.bias = block.linear.bias
    assert found(blocks) == ["blocks.0", "blocks.1"]


class Sharing(Block):
    """Has its linear layer in common with other blocks."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear


def test_units_leave_blocks_that_share_a_module_to_the_root() -> None:
    linear = nn.Linear(4, 4)
    assert found(nn.ModuleList([Sharing(linear), Sharing(linear), Sharing(nn.Linear(4, 4))])) == ["blocks.2"]
    assert found(nn.ModuleList([Sharing(linear), Sharing(linear), Block(), Block()])) == ["blocks.2", "blocks.3"]


def test_resolve_refuses_units_that_share_a_parameter() -> None:
    linear = nn.Linear(4, 4)
    model = Model(nn.ModuleList([Sharing(linear), Sharing(linear)]))
    with pytest.raises(ValueError, match=r"'blocks.\d' shares .* 'blocks.0.linear.weight', 'blocks.1.linear.weight';"):
        resolve_units(model, [Sharing])
    assert names(model, resolve_units(model, [Sharing, linear])) == ["blocks.0.linear", "blocks.1", "blocks.0"]
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"'embedding' shares .* 'embedding.weight', 'head.weight';"):
        resolve_units(model, ["embedding"])
    assert resolve_units(model, ["embedding"], {model.head.weight}) == [model.embedding]


def test_units_take_a_block_registered_twice_once() -> None:
    block, other = Block(), Block()
    assert found(nn.ModuleList([block, other, block])) == ["blocks.0", "blocks.1"]
    assert found(nn.ModuleList([block, block])) == []
    model = nn.Module()
    model.blocks, model.again = nn.ModuleList([block, other]), nn.ModuleList([other, block])
    assert names(model, find_units(model)) == ["blocks.0", "blocks.1"]


def test_units_may_be_children_of_a_root_that_is_a_container() -> None:
    model = nn.Sequential(Block(), Block())
    assert find_units(model) == list(model)


# -- the argument of compile


@pytest.fixture
def model() -> Model:
    return Model(nn.ModuleList([Block(), Block()]))


def test_resolve_finds_units_by_default(model: Model) -> None:
    assert resolve_units(model, None) == find_units(model) == list(model.blocks)


def test_resolve_takes_names_classes_and_modules(model: Model) -> None:
    assert set(resolve_units(model, ["blocks.1", "head"])) == {model.blocks[1], model.head}
    assert set(resolve_units(model, [Block])) == set(model.blocks)
    assert set(resolve_units(model, [nn.Linear])) == {model.head, *(block.linear for block in model.blocks)}
    assert resolve_units(model, [model.blocks[0]]) == [model.blocks[0]]
    assert resolve_units(model, []) == []


def test_resolve_takes_each_module_once(model: Model) -> None:
    assert len(resolve_units(model, [Block, "blocks.0", model.blocks[0]])) == 2


def test_resolve_puts_inner_units_first(model: Model) -> None:
    units = resolve_units(model, [Block, "blocks.0.linear"])
    assert units.index(model.blocks[0].linear) < units.index(model.blocks[0])


def test_resolve_leaves_out_the_root(model: Model) -> None:
    assert resolve_units(model, [Model, "head"]) == [model.head]


@pytest.mark.parametrize("unit", ["blocks.7", "Blocks.0", nn.Conv2d, nn.Linear(1, 1)], ids=str)
def test_resolve_refuses_what_the_model_does_not_have(unit: object, model: Model) -> None:
    with pytest.raises(ValueError, match=r"^compile: units: got .*, want modules of Model"):
        resolve_units(model, ["head", unit])  # type: ignore[list-item]


@pytest.mark.parametrize("unit", [3, None, int, torch.zeros(1)], ids=str)
def test_resolve_refuses_other_types(unit: object, model: Model) -> None:
    with pytest.raises(TypeError, match=r"^compile: units: got .*, want FQNs, module classes or modules"):
        resolve_units(model, [unit])  # type: ignore[list-item]


@pytest.mark.parametrize("units", [5, "blocks.0", Block, nn.Linear(1, 1)], ids=str)
def test_resolve_refuses_what_is_no_list(units: object, model: Model) -> None:
    with pytest.raises(TypeError, match=r"^compile: units: got .*, want a list"):
        resolve_units(model, units)  # type: ignore[arg-type]
