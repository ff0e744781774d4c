"""The copies as operators refuse what they cannot do, before anything is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphshard.kernels import ops as kernels

X = torch.arange(16.0)
GRADS = [torch.ones(4, 2), torch.ones(3)]

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a dim from behind": (lambda: kernels.GATHER_COPY_OUT(X, "4x2@-2:float32", 2), "got '4x2@-2:float32', want a size"),
    "a dim too many": (lambda: kernels.GATHER_COPY_OUT(X, "4x2@2:float32", 2), "got '4x2@2:float32', want a size"),
    "no member": (lambda: kernels.GATHER_COPY_OUT(X, "", 2), "got '', want a size"),
    "no dtype": (
        lambda: kernels.GATHER_COPY_OUT(X, "4x2@0:nn", 2),
        "gather_copy_out: members: got 'nn', want the name of a dtype",
    ),
    "no rank": (lambda: kernels.GATHER_COPY_OUT(X, "4x2@0:float32", 0), "world_size: got 0, want at least 1"),
    "an empty dtype": (
        lambda: kernels.GATHER_COPY_IN([X], ""),
        "gather_copy_in: dtypes: got '', want the name of a dtype",
    ),
    "integers with a factor": (
        lambda: kernels.REDUCE_COPY_IN(GRADS, [0, 0], 2, torch.int32, None, 2.0),
        "dtype: got torch.int32 with a factor, want a floating-point one",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_by_name(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith("graphshard::") and said in str(caught.value)


@pytest.mark.parametrize("scale", [(None, None), (2.0, None), (None, 2.0)])
def test_fakes_agree_with_what_is_computed(scale: tuple[float | None, float | None]) -> None:
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.REDUCE_COPY_IN, (GRADS, [0, 0], 2, torch.float32, *scale), test_utils=tests)
    torch.library.opcheck(kernels.GATHER_COPY_IN, ([X, X[:3]], "bfloat16,float32"), test_utils=tests)
    torch.library.opcheck(kernels.GATHER_COPY_OUT, (X, "8x2@1:float32", 2), test_utils=tests)
