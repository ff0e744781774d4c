"""What a unit's hooks do: they cast floating-point tensors, wherever FSDP2 looks for them, and nothing else; what needs
a gradient enters by an alias.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from graphshard.capture.parameters_in_forward import FORWARD, UnitForward
from graphshard.capture.unit_hooks import cast_floating, unit_hooks
from tests.graph.graphs import BF16, F16, F32

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    value: Tensor
    count: int = 3


@dataclasses.dataclass
class Record:
    value: Tensor
    name: str
    nested: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A record that can be indexed, as model libraries return it."""

    logits: Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def ones() -> Tensor:
    return torch.ones(2)


CONTAINERS = {
    "tensor": ones,
    "tuple": lambda: (ones(), [ones(), 1]),
    "list": lambda: [ones(), (ones(),), "text", None],
    "dict": lambda: {"a": ones(), "b": {"c": ones()}},
    "default dict": lambda: defaultdict(list, a=ones()),
    "ordered dict": lambda: OrderedDict(a=ones(), b=ones()),
    "named tuple": lambda: Pair(ones(), 2),
    "typed tuple": lambda: Typed(ones()),
    "dataclass": lambda: Record(ones(), "n", {"x": ones()}),
    "frozen dataclass": lambda: Frozen(ones()),
    "set": lambda: {ones()},
    "model output": lambda: ModelOutput(ones()),
    "empty": lambda: ((), [], {}),
    "opaque": lambda: Opaque(ones()),
}


def described(value: Any) -> Any:
    """Types and dtypes all the way down."""
    if isinstance(value, Tensor):
        return value.dtype
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return type(value), {key: described(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set)):
        return type(value), [described(item) for item in value]
    return type(value)


@pytest.mark.parametrize("name", CONTAINERS)
def test_casts_reach_what_fsdp2_reaches(name: str) -> None:
    value = CONTAINERS[name]()
    expected = _apply_to_tensors(lambda tensor: tensor.to(BF16), value)
    assert described(cast_floating(value, BF16)) == described(expected)


def test_casts_leave_their_argument_as_it_is() -> None:
    for make in CONTAINERS.values():
        value = make()
        before = described(value)
        cast_floating(value, BF16)
        assert described(value) == before


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_casts_leave_tensors_that_are_not_floating_point(dtype: torch.dtype) -> None:
    value = torch.ones(2).to(dtype)
    assert cast_floating(value, BF16) is value


@pytest.mark.parametrize("dtype", [F16, F32, torch.float64])
def test_casts_any_floating_point_dtype(dtype: torch.dtype) -> None:
    assert cast_floating([torch.ones(2, dtype=dtype)], BF16)[0].dtype == BF16


def test_casts_return_a_tensor_of_the_dtype_itself() -> None:
    value = ones()
    assert cast_floating((value,), F32)[0] is value


def test_casts_do_not_touch_classes_and_scalars() -> None:
    assert cast_floating(Record, BF16) is Record
    assert cast_floating(1.5, BF16) == 1.5


def test_casts_let_gradients_through() -> None:
    value = ones().requires_grad_()
    cast_floating({"x": value}, BF16)["x"].sum().backward()
    assert value.grad is not None
    assert value.grad.dtype == F32


def of_unit(module: nn.Module) -> nn.Module:
    """A module as `mark_classes` leaves it."""
    module.__dict__[FORWARD] = UnitForward("model")
    return module


def hooks(enters: bool = True, **policy: Any) -> tuple[Any, Any]:
    return unit_hooks(MixedPrecisionPolicy(**policy), enters)


def test_hooks_of_a_policy_that_casts_nothing_change_nothing() -> None:
    for policy in ({}, {"reduce_dtype": BF16}, {"param_dtype": BF16, "cast_forward_inputs": False}):
        pre, post = hooks(**policy)
        assert (
            pre(of_unit(nn.Identity()), (1.0,), {}) == ((1.0,), {})
            and post(of_unit(nn.Identity()), (1.0,), 2.0) is None
        )


def test_what_needs_a_gradient_enters_by_an_alias() -> None:
    pre, _ = hooks()
    x, mask, kept = ones().requires_grad_(), ones(), [ones().requires_grad_()]
    args, kwargs = pre(of_unit(nn.Identity()), (x, (mask, x)), {"kept": kept, "y": x})
    assert args[0] is not x and args[0].data_ptr() == x.data_ptr() and args[0].requires_grad
    assert args[1][0] is mask and args[1][1] is not x and list(kwargs) == ["kept", "y"] and kwargs["kept"] is kept
    args[0].mul(2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    with torch.no_grad():
        assert pre(of_unit(nn.Identity()), (x,), {}) is None
    assert hooks(enters=False)[0](of_unit(nn.Identity()), (x,), {}) is None


def test_hooks_cast_inputs_to_param_dtype_and_outputs_to_output_dtype() -> None:
    pre, post = hooks(param_dtype=BF16, output_dtype=F16)
    module = of_unit(nn.Identity())
    args, kwargs = pre(module, (ones(), 1), {"mask": torch.ones(2, dtype=torch.bool), "x": ones()})
    assert (args[0].dtype, args[1], kwargs["mask"].dtype, kwargs["x"].dtype) == (BF16, 1, torch.bool, BF16)
    assert post(module, (), {"out": ones()})["out"].dtype == F16


def test_hooks_fit_modules() -> None:
    linear = of_unit(nn.Linear(2, 2, dtype=BF16))
    pre, post = hooks(param_dtype=BF16, output_dtype=F32)
    linear.register_forward_pre_hook(pre, with_kwargs=True)
    linear.register_forward_hook(post)
    assert linear(input=ones()).dtype == F32


def test_hooks_of_two_policies_do_not_share() -> None:
    first, second = hooks(param_dtype=BF16)[0], hooks(param_dtype=F16)[0]
    module = of_unit(nn.Identity())
    assert first(module, (ones(),), {})[0][0].dtype == BF16
    assert second(module, (ones(),), {})[0][0].dtype == F16


def test_hooks_say_whether_the_forward_of_their_unit_runs() -> None:
    module = of_unit(nn.Identity())
    pre, post = hooks()
    seen = [module.__dict__[FORWARD].runs]
    pre(module, (), {})
    seen.append(module.__dict__[FORWARD].runs)
    post(module, (), None)
    assert [*seen, module.__dict__[FORWARD].runs] == ["", "model", ""]
