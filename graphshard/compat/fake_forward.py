"""A forward on tensors without data: which parameters it reads, and what stops it. Nothing is sent."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def make_mode() -> FakeTensorMode:
    """A mode in which tensors have no data; others that meet them are taken for such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_of(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor without data like `tensor`, which is on `device` if that has none."""
    if tensor.device.type != "meta":
        plain = tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
        fake: Tensor = mode.from_tensor(plain)
        return fake
    with mode:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(like, tensor.requires_grad)
        return like.requires_grad_(tensor.requires_grad)


def fake_values(mode: FakeTensorMode, values: Any, device: torch.device) -> Any:
    """`values` with every tensor without data, and on `device`, where a model's inputs are moved."""

    def fake(tensor: Tensor) -> Tensor:
        return fake_of(mode, tensor if tensor.device.type == device.type else tensor.to("meta"), device)

    return tree_map_only(Tensor, fake, values)


def first_device(values: Any) -> torch.device:
    """Of the first tensor in `values`; the CPU if there is none."""
    return next((leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), torch.device("cpu"))


class Communicates(RuntimeError):
    """A forward would send something, if it went on."""


class _SendsNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a forward before it sends something: some collectives do, of tensors without data, too. Functional ones,
    which are what Dynamo makes of others in a graph, do not.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:  # else Dynamo would trace nothing inside
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise Communicates(f"{func}, outside a graph")
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Notes which of some tensors go into a function that returns a tensor."""

    def __init__(self, watched: Iterable[Tensor]) -> None:
        super().__init__()
        self._watched = {id(tensor) for tensor in watched}
        self.read: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} & self._watched
        if found and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.read |= found
        return result


@contextmanager
def watched_reads(mode: FakeTensorMode, watched: Iterable[Tensor]) -> Iterator[set[int]]:
    """Inside, a forward runs without data; yields the ids of those of `watched` that it has read.

    Raises:
        Communicates: it would send something.
    """
    with without_data(mode), _Reads(watched) as reads:
        yield reads.read


@contextmanager
def without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, a forward runs without data, under Dynamo if it is to.

    Raises:
        Communicates: it would send something.
    """
    sends_nothing: Any = _SendsNothing()  # type: ignore[no-untyped-call]
    with mode, sends_nothing:
        yield


@contextmanager
def same_random_state() -> Iterator[None]:
    """Puts back the state of the random number generators of CPU, Python and NumPy."""
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
