"""Score options: products q k^T to scores and back. All of an option is in this file.

    a = scale q k^T, with a softcap c: c tanh(scale q k^T / c)
    s = a + bias - slope |i + offset - j| + relative_bias[i + relative_offset - j]

With relative keys, k stands for k_j + relative_keys[i + relative_offset - j]: relative_keys.py.
docs/attention.md, sections 2 and 3.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....problem import Problem
from ....scores.options import ScoreOptions
from .arguments import broadcast_strides, contiguous

LOG2E = tl.constexpr(1.0 / math.log(2.0))
LN2 = tl.constexpr(math.log(2.0))
LARGEST_ROUNDED = 2.0**26
"""Largest row maximum, in base 2, that fused exponents of the forward pass round (by up to 4)."""
LARGEST_FUSED = tl.constexpr(1024.0)
"""Largest lse, in base 2, with fused exponents in the backward pass."""
FLOAT32 = torch.finfo(torch.float32)
LOWEST = tl.constexpr(FLOAT32.min)


class Scores(NamedTuple):
    """Parameters that turn a product q k^T into a score."""

    scale: float
    plain_scale: float | None
    """log2(e) * scale; None if there is a softcap, a bias of any kind, or if the scale is near the
    limits of float32: a scale that rounds to 0 would turn masked scores (-inf) into NaN"""
    plain_power: float | None
    """largest power of 2 up to scale, see `fused_unit`"""
    plain_limit: float | None
    """product above which fused exponents use plain_power"""
    softcap: float | None
    bias: Tensor | None
    bias_b: int | None
    """strides: 0 for a dimension of size 1, None if the tensor is None"""
    bias_h: int | None
    bias_i: int | None
    bias_j: int | None
    columns: int | None
    """N if there is a bias, else None: see `MaskTensors`"""
    slopes: Tensor | None
    slopes_b: int | None
    """0 if all sequences share the slopes, else H_q"""
    relative_bias: Tensor | None
    relative_h: int | None
    """0 if all heads share one row of the relative bias, else 1"""
    relative_keys: Tensor | None
    relative_keys_h: int | None
    """0 if all heads share the relative keys, else 1"""


def scores(problem: Problem, scale: float) -> Scores:
    options = problem.scores
    slopes, table, keys = options.alibi_slopes, options.relative_bias, options.relative_keys
    biases = (options.bias, slopes, table)
    plain = not options.softcap and all(x is None for x in biases) and 1e-37 < scale < 1e37
    plain_scale = scale * LOG2E.value if plain else None
    bias_b, bias_h, bias_i, bias_j = broadcast_strides(options.bias, 4)
    return Scores(
        scale=scale,
        plain_scale=plain_scale,
        plain_power=2.0 ** math.floor(math.log2(scale)) if plain else None,
        plain_limit=min(LARGEST_ROUNDED / plain_scale, FLOAT32.max) if plain_scale else None,
        softcap=options.softcap or None,
        bias=options.bias,
        bias_b=bias_b,
        bias_h=bias_h,
        bias_i=bias_i,
        bias_j=bias_j,
        columns=None if options.bias is None else problem.shape.N,
        slopes=contiguous(slopes),
        slopes_b=None if slopes is None else int(slopes.shape[0] > 1) * slopes.shape[1],
        relative_bias=contiguous(table),
        relative_h=None if table is None else int(table.shape[0] > 1),
        relative_keys=contiguous(keys),
        relative_keys_h=None if keys is None else int(keys.shape[0] > 1),
    )


def bytes_per_score(options: ScoreOptions) -> int:
    """Returns the bytes that score options load per score."""
    loaded = (options.bias, options.relative_bias)
    return sum(x.element_size() for x in loaded if x is not None)


@triton.jit
def load_bias(scores, coords, band):
    """Tile of the dense plus the relative bias. Triton 3.6 cannot return None."""
    if scores.bias is None:
        if scores.relative_bias is None:
            return 0.0
        else:
            return load_relative_bias(scores, coords, band)
    else:
        bias = load_dense_bias(scores, coords, band)
        if scores.relative_bias is not None:
            bias = bias.to(tl.float32) + load_relative_bias(scores, coords, band)
        return bias


@triton.jit
def load_dense_bias(scores, coords, band):
    """Bias tile, 0 outside M x N"""
    b, h = tl.cast(coords.b, tl.int64), tl.cast(coords.h, tl.int64)
    i, j = coords.i.to(tl.int64) * scores.bias_i, coords.j.to(tl.int64) * scores.bias_j
    at = scores.bias + b * scores.bias_b + h * scores.bias_h + i + j
    return tl.load(at, mask=(coords.i < band.M) & (coords.j < scores.columns), other=0.0)


@triton.jit
def load_relative_bias(scores, coords, band):
    """Tile of the relative bias, 0 outside its table: rows past M, keys past N, and distances of
    sequences that are longer than their upper bounds"""
    index = coords.i + band.relative_offset - coords.j
    row = tl.cast(coords.h, tl.int64) * scores.relative_h * band.distances
    at = scores.relative_bias + row + index
    return tl.load(at, mask=is_distance(index, band), other=0.0)


@triton.jit
def is_distance(index, band):
    """True if 0 <= index < distances: one comparison, since negative numbers wrap around"""
    return index.to(tl.uint32) < band.distances.to(tl.uint32)


@triton.jit
def tanh(x):
    """tanh, accurate to a few ulp: a Taylor series near 0, where (1 - t) / (1 + t) cancels"""
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    y = x * x
    # Odd Taylor series. For |x| < 0.35 the next term is below 2^-26 of the first.
    near = 1.0 + y * (
        -1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925))))
    )
    return tl.where(tl.abs(x) < 0.35, x * near, tl.where(x < 0, -far, far))


@triton.jit
def scaled(products, scores):
    """a: scale * q k^T, with softcap"""
    a = products * scores.scale
    if scores.softcap is not None:
        a = scores.softcap * tanh(a / scores.softcap)
    return a


@triton.jit
def natural_scores(products, bias, scores, coords, band):
    """s in natural units, not masked"""
    s = scaled(products, scores)
    if scores.bias is not None or scores.relative_bias is not None:
        s += bias.to(tl.float32)
    if scores.slopes is not None:
        distance = tl.abs(coords.i + band.offset - coords.j).to(tl.float32)
        s -= tl.load(scores.slopes + coords.b * scores.slopes_b + coords.h) * distance
    return s


@triton.jit
def unscaled_scores(products, bias, scores, coords, band):
    """Scores that the softmax converts by `log2_unit` and `natural_unit`: products if nothing but a
    scale is applied to them"""
    if scores.plain_scale is not None:
        return products
    else:
        return natural_scores(products, bias, scores, coords, band)


@triton.jit
def finite_maximum(m, scores, MASKED: tl.constexpr):
    """Row maximum m, 0 where all scores so far are -inf"""
    if MASKED or scores.bias is not None or scores.relative_bias is not None:
        return tl.where(m == float("-inf"), 0.0, m)
    else:
        return m


@triton.jit
def fused_unit(m, scores):
    """Factor of fused exponents, unit s - round(unit m). For large m it is a power of 2: unit m is
    exact, and other weights are so small that their unit does not matter."""
    return tl.where(tl.abs(m) > scores.plain_limit, scores.plain_power, scores.plain_scale)


@triton.jit
def fused_maximum(m, unit):
    """round(unit m), finite where all scores so far are -inf"""
    return tl.maximum(m * unit, LOWEST)


@triton.jit
def is_any_large(lse2):
    """True if some lse, in base 2, is too large for fused exponents. Those of fully masked rows are
    infinite."""
    return tl.max(tl.where(tl.abs(lse2) < float("inf"), tl.abs(lse2), 0.0), 0) > LARGEST_FUSED


@triton.jit
def log2_unit(scores):
    """Factor that converts `unscaled_scores` to base 2"""
    if scores.plain_scale is not None:
        return scores.plain_scale
    else:
        return LOG2E


@triton.jit
def natural_unit(scores):
    """Factor that converts `unscaled_scores` to natural logarithms"""
    if scores.plain_scale is not None:
        return scores.scale
    else:
        return 1.0


@triton.jit
def product_gradients(ds, products, scores):
    """da of a tile, from ds"""
    if scores.softcap is None:
        return ds
    else:
        t = scaled(products, scores) / scores.softcap
        return tl.where(ds != 0.0, ds * (1.0 - t * t), 0.0)  # products may be NaN where hidden
