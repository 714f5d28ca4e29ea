"""Relative keys: products of queries and the keys of distances, added to the products q k^T.

A tile of T queries and T keys has 2 T - 1 distances, which are read as two blocks of T rows. Their
products with the queries are (T, T) tiles by distance. Row r of a tile by key is row r of a tile by
distance, rotated: key u is in column (u - r - 1) mod T, of the first block if r >= u and of the
second block otherwise. docs/attention.md, section 3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import Head, load_rows


class RelativeRows(NamedTuple):
    """Relative keys of a tile, (T, BLOCK_D) each, in descending order of the distance: those of
    pairs r >= u, and those of pairs r < u."""

    upper: Any
    lower: Any


@triton.jit
def load_relative_rows(scores, coords, band, sizes):
    """`RelativeRows` of a tile, 0 at distances that no pair of the band has: they may hold NaN, and
    0 * NaN is NaN"""
    if scores.relative_keys is None:
        return RelativeRows(0.0, 0.0)
    else:
        SIDE: tl.constexpr = sizes.BLOCK_M
        tl.static_assert(sizes.BLOCK_N == SIDE, "tiles with relative keys are square")
        h = tl.cast(coords.h, tl.int64) * scores.relative_keys_h
        last = coords.i0 - coords.j0 + band.relative_offset + SIDE - 1
        of_head = scores.relative_keys + (h * band.distances + last) * sizes.D
        rows = Head(of_head, -sizes.D, 0)
        index = last - tl.arange(0, SIDE)
        upper = load_rows(rows, 0, is_used(index, band), sizes.D, sizes.BLOCK_D, True)
        index -= SIDE
        lower = load_rows(rows, SIDE, is_used(index, band), sizes.D, sizes.BLOCK_D, True)
        return RelativeRows(upper, lower)


@triton.jit
def is_used(index, band):
    """True for distances inside the table that a pair of the band has"""
    low = tl.maximum(band.low, band.begin + 1 - band.M)  # of j - i
    high = tl.minimum(band.high, band.end - 1)
    first = tl.maximum(band.relative_offset - high, 0)
    return (index >= first) & (index <= tl.minimum(band.relative_offset - low, band.distances - 1))


@triton.jit
def tile_products(q_tile, k_tile, relative, scores, sizes, TRANSPOSED: tl.constexpr):
    """q (k + r)^T of a tile: (queries, keys), or (keys, queries) if TRANSPOSED"""
    PRECISION: tl.constexpr = sizes.PRECISION
    if TRANSPOSED:
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    else:
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if scores.relative_keys is not None:
        SIDE: tl.constexpr = sizes.BLOCK_M
        if TRANSPOSED:
            upper = tl.dot(relative.upper, tl.trans(q_tile), input_precision=PRECISION)
            lower = tl.dot(relative.lower, tl.trans(q_tile), input_precision=PRECISION)
            r, u = tl.arange(0, SIDE)[None, :], tl.arange(0, SIDE)[:, None]
            by_distance = tl.where(r + u >= SIDE - 1, upper, lower)
            products += tl.gather(by_distance, (u - r - 1) & (SIDE - 1), axis=0)
        else:
            upper = tl.dot(q_tile, tl.trans(relative.upper), input_precision=PRECISION)
            lower = tl.dot(q_tile, tl.trans(relative.lower), input_precision=PRECISION)
            r, u = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
            by_distance = tl.where(r + u >= SIDE - 1, upper, lower)
            products += tl.gather(by_distance, (u - r - 1) & (SIDE - 1), axis=1)
    return products


@triton.jit
def add_relative_rows(total, da, relative, scores, sizes):
    """Adds the products of da and the relative keys to dq / scale"""
    if scores.relative_keys is not None:
        PRECISION: tl.constexpr = sizes.PRECISION
        SIDE: tl.constexpr = sizes.BLOCK_M
        r, t = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
        by_distance = tl.gather(da, (t + r + 1) & (SIDE - 1), axis=1).to(relative.upper.dtype)
        is_upper = r + t >= SIDE - 1
        upper = tl.where(is_upper, by_distance, 0.0).to(by_distance.dtype)
        lower = tl.where(is_upper, 0.0, by_distance).to(by_distance.dtype)
        total = tl.dot(upper, relative.upper, total, input_precision=PRECISION)
        total = tl.dot(lower, relative.lower, total, input_precision=PRECISION)
    return total
