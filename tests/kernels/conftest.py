"""Kernels under Triton's interpreter, on CPU tensors. `tests/graph/test_kernels.py` runs this folder in a process
of its own, since one interprets or compiles as it was told before it imported Triton.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    _convert = interpreter._convert_float

    def _round_to_bfloat16(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """The interpreter cuts bits off where hardware rounds to the nearest even."""
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
            rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
            return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded).reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.astype(np.uint32) << 16).view(np.float32).reshape(data.shape)
        return _convert(data, source, target, rounding)

    interpreter._convert_float = _round_to_bfloat16
    np.seterr(all="ignore")  # infinities are values like others
