"""Corrections to the arithmetic of Triton's interpreter.

With TRITON_INTERPRET=1 Triton runs kernels in numpy on the CPU. Triton 3.6 to 3.9 then differs from
a GPU as follows:

- bfloat16 is stored as 16-bit integers, and dot products multiply these as integers;
- products are sums in the order of the CPU's matrix library: a product and its transpose may differ
  in the last bit, and some kernels compute both;
- conversion to bfloat16 truncates instead of rounding to nearest even;
- float32 products ignore `input_precision`, and "bf16x3" and "bf16x6" are rejected;
- fields of tuples that are `tl.constexpr` are not unwrapped.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from transformer_kernels.backends.triton import target


@functools.cache
def install() -> None:
    """Patches the interpreter to round products, bfloat16 and its parts as a GPU does, and to run
    faster. The triton backend then runs in it."""
    target.interpreter_rounds_as_a_gpu = True
    builder: Any = interpreter.InterpreterBuilder
    executor: Any = interpreter.GridExecutor
    plain_cast = builder.cast_impl
    plain_run = executor.__call__

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        parts = _PARTS.get(str(precision)[-6:]) if a.dtype.scalar == tl.float32 else None
        if parts is None:
            total = _with_product(d.data, (_widened(a).data, _widened(b).data))
        else:
            total = functools.reduce(_with_product, _part_operands(a.data, b.data, parts), d.data)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def cast(self: Any, x: Any, to: Any) -> Any:
        source, target = x.dtype.scalar, to.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            return plain_cast(self, _widened(x), to)
        if target == tl.bfloat16 and source != tl.bfloat16:
            wide = plain_cast(self, x, tl.float32).data.astype(np.float32)
            return interpreter.TensorHandle(_rounded_to_bfloat16(wide), tl.bfloat16)
        return plain_cast(self, x, to)

    patched: set[Any] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        with np.errstate(all="ignore"):  # inf - inf is expected: no warning
            plain_run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Patches each function once per launch. Triton does so in every call: half of the run time.
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    options: Any = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(
        options,
        allowed_dot_input_precisions=(*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"),
        sanitize_overflow=False,  # its assertions need `debug`, but take half of the time
    )
    builder.create_dot, builder.cast_impl = dot, cast
    executor.__call__, interpreter.InterpretedFunction.__call__ = run, call
    _unwrap_fields()


def _unwrap_fields() -> None:
    """Unwraps fields of tuples that are `tl.constexpr`, as the interpreter does with arguments."""
    plain = interpreter._implicit_cvt

    def convert(x: Any) -> Any:
        return x.value if isinstance(x, tl.constexpr) else plain(x)

    interpreter._implicit_cvt = convert


def _rounded_to_bfloat16(x: Any) -> Any:
    """Bits of float32 values rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _widened(x: Any) -> Any:
    """A tensor of bfloat16 as float32; others as they are."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _with_product(total: Any, operands: tuple[Any, Any]) -> Any:
    """Adds a product, summed in float64: once rounded, the order of its sums does not matter."""
    a, b = (x.astype(np.float64) for x in operands)
    return total + np.matmul(a, b).astype(total.dtype)


_PARTS = {"BF16x3": 2, "BF16x6": 3}
"""Bfloat16 parts of a float32 operand, by the precision of a product"""


def _part_operands(a: Any, b: Any, count: int) -> list[tuple[Any, Any]]:
    """Operands of the bfloat16 products that make up one of float32, smallest first."""
    a, b = _bfloat16_parts(a, count), _bfloat16_parts(b, count)
    return [(a[i], b[n - i]) for n in reversed(range(count)) for i in reversed(range(n + 1))]


def _bfloat16_parts(x: Any, count: int) -> list[Any]:
    """Bfloat16 values that sum to x; all but the first are 0 where x is infinite or NaN."""
    parts = []
    for _ in range(count):
        part = (_rounded_to_bfloat16(x).astype(np.uint32) << 16).view(np.float32)
        parts.append(part)
        x = np.where(np.isfinite(x), x - part, 0.0).astype(np.float32)
    return parts
