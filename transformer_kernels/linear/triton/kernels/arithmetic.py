"""Feature maps and their derivatives; matrix products in every precision, see `tiles.Precision`."""

import triton
import triton.language as tl

ELU = tl.constexpr(0)
RELU = tl.constexpr(1)


@triton.jit
def features(x, sizes):
    """phi(x) in float32. Maxima and minima would drop NaN."""
    x = x.to(tl.float32)
    if sizes.FEATURES == ELU:
        return tl.where(x > 0.0, x + 1.0, tl.exp(x))
    elif sizes.FEATURES == RELU:
        return tl.where(x < 0.0, 0.0, x)
    else:
        return x


@triton.jit
def times_slope(y, x, sizes):
    """y phi'(x)"""
    x = x.to(tl.float32)
    if sizes.FEATURES == ELU:
        return tl.where(x > 0.0, y, y * tl.exp(x))
    elif sizes.FEATURES == RELU:
        return tl.where(x <= 0.0, 0.0, y)
    else:
        return y


@triton.jit
def product(a, b, sizes):
    """a b in float32"""
    return add_product(tl.zeros([a.shape[0], b.shape[1]], tl.float32), a, b, sizes)


@triton.jit
def add_product(total, a, b, sizes):
    """total + a b in float32"""
    if sizes.PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif sizes.PRECISION == "tf32":
        return tl.dot(rounded_to_tf32(a), rounded_to_tf32(b), total, input_precision="tf32")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=sizes.PRECISION)


@triton.jit
def rounded_to_tf32(x):
    """x, float32 or float16, rounded to 11 bits, to nearest even: the matrix units would truncate
    it"""
    if x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
