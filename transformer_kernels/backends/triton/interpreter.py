"""Triton's interpreter: whether it is on, and its bfloat16 mended.

With TRITON_INTERPRET=1 Triton runs kernels by numpy on the CPU. It keeps bfloat16 as 16-bit
integers, which its dot products then multiply as such, and it truncates where a GPU rounds
(Triton 3.6 to 3.9). It also computes every product of float32 in float32, whatever precision a
kernel asks for.
"""

from __future__ import annotations

import functools
import os
from typing import Any

_ON = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def is_on() -> bool:
    """Whether kernels are interpreted, on CPU tensors: TRITON_INTERPRET as it was at import."""
    return _ON


@functools.cache
def mend() -> None:
    """Makes the interpreter round as a GPU does, bfloat16 and products in tf32x3; and faster."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl
    plain_run = executor.__call__

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.float32 and str(precision).endswith("TF32x3"):
            for one, other in _tf32_products(a.data, b.data):
                a, b = (interpreter.TensorHandle(x, tl.float32) for x in (one, other))
                d = plain_dot(self, a, b, d, precision, *rest)
            return d
        return plain_dot(self, widened(a), widened(b), d, precision, *rest)

    def cast(self: Any, x: Any, to: Any) -> Any:
        source, target = x.dtype.scalar, to.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            return plain_cast(self, widened(x), to)
        if target == tl.bfloat16 and source != tl.bfloat16:
            wide = plain_cast(self, x, tl.float32).data.astype(np.float32)
            return interpreter.TensorHandle(_rounded_to_bfloat16(wide), tl.bfloat16)
        return plain_cast(self, x, to)

    patched: set[Any] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        with np.errstate(all="ignore"):  # inf - inf is NaN, and no more than that
            plain_run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Once a launch, where Triton patches its language for every call: half of the time.
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    builder.create_dot, builder.cast_impl = dot, cast
    executor.__call__, interpreter.InterpretedFunction.__call__ = run, call


def _rounded_to_bfloat16(x: Any) -> Any:
    """float32 to the upper half of its bits, to nearest even; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _tf32_products(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """The three products of tensor-float-32 parts that stand for one of float32, smallest first."""
    (a_high, a_low), (b_high, b_low) = _tf32_parts(a), _tf32_parts(b)
    return [(a_low, b_high), (a_high, b_low), (a_high, b_high)]


def _tf32_parts(x: Any) -> tuple[Any, Any]:
    """x to 10 bits behind the leading one, to nearest; and the rest, which is cut to as many."""
    import numpy as np

    bits = np.ascontiguousarray(x).view(np.uint32)
    high = np.where(np.isfinite(x), (bits + 0x1000) & 0xFFFFE000, bits).view(np.float32)
    low = np.where(np.isfinite(x), x - high, 0.0).astype(np.float32)
    return high, (low.view(np.uint32) & 0xFFFFE000).view(np.float32)
