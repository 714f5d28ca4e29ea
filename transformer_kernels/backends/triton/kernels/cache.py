"""Caches: keys and values in pages, and in int8. All of both is in this file: the arguments, the
loads of a block of keys, and their products.

    key j of sequence b is row j % page_size of page table[b, j // page_size]
    s = k_scale[j] (q k_int8^T),  o = (p v_scale[j]) v_int8: docs/attention.md, section 6
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....problem import Problem
from .arguments import broadcast_strides, contiguous
from .primitives import load_rows, load_tile


class Cache(NamedTuple):
    """Block table of pages, and scales of int8 keys and values; None in calls without them."""

    table: Tensor | None
    table_b: int | None
    """stride; also below"""
    pages: int | None
    page_size: tl.constexpr
    k_scale: Tensor | None
    k_scale_b: int | None
    """of a page, or of a batch entry"""
    k_scale_h: int | None
    k_scale_j: int | None
    v_scale: Tensor | None
    v_scale_b: int | None
    v_scale_h: int | None
    v_scale_j: int | None


def cache(problem: Problem, k: Tensor) -> Cache:
    layout = problem.layout
    table, k_scale, v_scale = layout.block_table, layout.k_scale, layout.v_scale
    k_strides, v_strides = broadcast_strides(k_scale, 3), broadcast_strides(v_scale, 3)
    return Cache(
        table=contiguous(table),
        table_b=None if table is None else table.shape[1],
        pages=None if table is None else k.shape[0],
        page_size=tl.constexpr(0 if table is None else k.shape[2]),
        k_scale=k_scale,
        k_scale_b=k_strides[0],
        k_scale_h=k_strides[1],
        k_scale_j=k_strides[2],
        v_scale=v_scale,
        v_scale_b=v_strides[0],
        v_scale_h=v_strides[1],
        v_scale_j=v_strides[2],
    )


class Places(NamedTuple):
    """Places of a block of keys in memory: the page, or the batch entry, and the row in it. Keys
    that are not `stored` are read as 0."""

    entry: Any
    row: Any
    stored: Any


@triton.jit
def key_places(cache, b, j, live):
    """`Places` of keys j. The block table is on the device and not validated: pages that do not
    exist are not read."""
    if cache.table is None:
        return Places(b, j, live)
    else:
        at = cache.table + tl.cast(b, tl.int64) * cache.table_b + j // cache.page_size
        page = tl.load(at, mask=live, other=-1)
        return Places(page, j % cache.page_size, (page >= 0) & (page < cache.pages))


@triton.jit
def load_keys(
    head, j0, places, cache, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """`load_rows` of keys or values from j0 on, which may be in pages"""
    if cache.table is None:
        return load_rows(head, j0, places.stored, WIDTH, BLOCK, CHECKED)
    else:
        row = places.entry.to(tl.int64) * head.entry_stride + places.row.to(tl.int64) * head.stride
        at = head.data + row[:, None] + tl.arange(0, BLOCK)[None, :]
        return load_tile(at, places.stored, WIDTH, True)


@triton.jit
def load_scales(scale, stride_b, stride_h, stride_j, places, kv):
    """Scales of a block of int8 keys or values of key head kv"""
    at = tl.cast(places.entry, tl.int64) * stride_b + tl.cast(kv, tl.int64) * stride_h
    at += places.row.to(tl.int64) * stride_j
    return tl.load(scale + at, mask=places.stored, other=0.0)


@triton.jit
def scaled_products(products, cache, places, kv):
    """Products q k^T of a block, times the scales of int8 keys"""
    if cache.k_scale is not None:
        strides = cache.k_scale_b, cache.k_scale_h, cache.k_scale_j
        products *= load_scales(cache.k_scale, *strides, places, kv)[None, :]
    return products


@triton.jit
def add_values(acc, p, v_tile, cache, places, kv, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p v. int8 values are multiplied in the `dtype` of the queries."""
    if cache.v_scale is None:
        return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    else:
        strides = cache.v_scale_b, cache.v_scale_h, cache.v_scale_j
        p *= load_scales(cache.v_scale, *strides, places, kv)[None, :]
        if dtype == tl.float16:
            # A scaled weight may be below the range of float16: it is two bfloat16 parts.
            v_tile, high = v_tile.to(tl.bfloat16), p.to(tl.bfloat16)
            acc = tl.dot(high, v_tile, acc)
            return tl.dot((p - high.to(tl.float32)).to(tl.bfloat16), v_tile, acc)
        else:
            return tl.dot(p.to(dtype), v_tile.to(dtype), acc, input_precision=PRECISION)
