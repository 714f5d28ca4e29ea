"""Host side of a pass: allocates outputs, selects tiles and launches the kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...masks.resolved import BLOCK_MASK_SIZE
from ...problem import Problem, Saved
from .. import schema
from ..base import Gradients
from . import config, target
from .config import Kernel, Tile
from .kernels import arguments, cache, dropout, masks, scores
from .kernels.backward import bwd_dkdv_kernel, bwd_dq_kernel
from .kernels.block_lists import block_mask_kernel, list_kernel
from .kernels.block_ranges import NO_LISTS, BlockLists
from .kernels.decode import Partial, combine_kernel, decode_kernel
from .kernels.forward import forward_kernel
from .kernels.option_gradients import (
    column_sums_kernel,
    distance_sums_kernel,
    strip_sums_kernel,
    tile_sums_kernel,
)
from .kernels.score_gradient import Statistics, bwd_preprocess_kernel

MAX_ROW_STRIDE = 1 << 24
"""Largest row stride, in elements, for which offsets inside a tile fit in 32 bits."""
MIN_PROGRAMS = 1024
"""Programs of the gradient of relative keys: fewer blocks of distances split batch and heads."""
DECODE_PROGRAMS = 4
"""Programs of decoding for each multiprocessor: with fewer, keys are split. Not measured."""
COMBINED_ELEMENTS = 4096
"""Elements of the partial outputs that a program of the combine kernel loads at a time."""


class Pass(NamedTuple):
    """Inputs of one pass, with unit-stride rows, and the kernel arguments made from its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    scalars: arguments.Scalars
    heads: arguments.Heads
    sequences: arguments.Sequences
    mask: masks.MaskTensors
    scores: scores.Scores
    dropout: dropout.Dropout
    cache: cache.Cache

    def output(self, like: Tensor, width: int) -> Tensor:
        """Allocates (B, H, L, width): zeros for varlen calls, whose trailing padding is not
        written, else uninitialized."""
        x = schema.empty_like_layout(like, width)
        return x if self.sequences.cu_q is None else x.zero_()

    def blocks_of(self, rows: int, block: int, heads: int) -> int:
        """Number of programs that cover `rows` in blocks of `block`, for all heads and batches."""
        return -(-rows // block) * heads * self.problem.shape.B


class Operands(NamedTuple):
    """Leading arguments of every backward kernel, in order."""

    q: arguments.Rows
    k: arguments.Rows
    v: arguments.Rows
    do: arguments.Rows
    statistics: Statistics


def prepare(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Pass:
    shape = problem.shape
    tables = (problem.scores.relative_bias, problem.scores.relative_keys)
    is_varlen = problem.layout.kind == "varlen"
    if is_varlen and all(x is None for x in tables):  # whose distances are of the upper bounds
        # A max_seqlen beyond the rows in memory would add empty programs.
        N = shape.N if problem.layout.has_packed_pages else min(shape.N, k.shape[2])
        shape = shape._replace(M=min(shape.M, q.shape[2]), N=N)
        problem = replace(problem, shape=shape)
    return Pass(
        as_rows(q),
        as_rows(k),
        as_rows(v),
        problem,
        arguments.scalars(problem, q, k),
        arguments.Heads(shape.H_q, shape.H_q // shape.H_kv),
        arguments.sequences(problem),
        masks.mask_tensors(problem),
        scores.scores(problem, problem.scale),
        dropout.dropout(problem.scores),
        cache.cache(problem, k),
    )


def forward(call: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (o, row_stats, block_mask); the block mask has no elements if the mask needs none."""
    o = call.output(call.q, call.problem.shape.D_v)
    row_stats = call.q.new_empty(2, *call.q.shape[:3], dtype=torch.float32)
    if call.sequences.cu_q is not None:
        row_stats.zero_()[0] = float("-inf")
    block_mask = fill_block_mask(call)
    scale = call.problem.scale
    if scale < 0.0:  # the kernel computes row maxima before scaling, which needs scale >= 0
        call = call._replace(q=-call.q, scores=scores.scores(call.problem, -scale))
    operands = (*map(arguments.rows, (call.q, call.k, call.v, o)), *row_stats)
    launch_blocks(forward_kernel, "forward", call, operands, block_mask, (call.cache,))
    return o, row_stats, block_mask


def decode(call: Pass) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (o, row_stats, block_mask) of a call with a cache; row_stats is lse alone."""
    p = call.problem.shape
    o = call.output(call.q, p.D_v)
    lse = call.q.new_empty(1, *call.q.shape[:3], dtype=torch.float32)
    tile, sizes, pack, splits = decode_tiling(call.problem)
    partial = Partial(None, None, None)
    if splits > 1:
        m, l_ = lse.new_empty(2, *call.q.shape[:3], splits)
        partial = Partial(m, l_, lse.new_empty(*m.shape, p.D_v))
    launch(
        decode_kernel,
        call.blocks_of(p.M * pack, tile.block_m, p.H_q // pack) * splits,
        *map(arguments.rows, (call.q, call.k, call.v, o)),
        lse,
        partial,
        call.problem.layout.cache_seqlens,
        pack,
        splits,
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        NO_LISTS,
        call.scores,
        call.dropout,
        call.cache,
        sizes,
        **resources(tile),
    )
    if splits > 1:
        given = (arguments.rows(o), lse, partial, p.M, splits, call.heads, call.scores)
        width = config.width(p.D_v)
        blocks = {"BLOCK_M": COMBINED_ELEMENTS // width, "BLOCK_DV": width}
        launch(combine_kernel, p.B * p.H_q * p.M, *given, D_V=p.D_v, **blocks)
    return o, lse, fill_block_mask(call)


def decode_tiling(problem: Problem) -> tuple[Tile, arguments.Sizes, int, int]:
    """Returns the tile, its sizes, the query heads of a tile, and the number of splits.

    The number of splits depends on sizes and the GPU, not on the lengths in device memory.
    """
    p, mask = problem.shape, problem.mask
    has_keys = problem.scores.relative_keys is not None
    pack = 1 if has_keys else p.H_q // p.H_kv  # each head may have its own relative keys
    tile, sizes = tiling("forward" if has_keys else "decode", problem)
    if not has_keys:
        tile = replace(tile, block_m=min(tile.block_m, config.width(p.M * pack)))
        sizes = sizes._replace(BLOCK_M=tl.constexpr(tile.block_m))
    programs = -(-p.M * pack // tile.block_m) * (p.H_q // pack) * p.B
    visible = min(p.N, mask.diagonal_high - mask.diagonal_low + p.M)
    wanted = -(-DECODE_PROGRAMS * target.multiprocessors(p.device) // max(programs, 1))
    return tile, sizes, pack, max(1, min(wanted, -(-visible // (2 * tile.block_n))))


def backward(
    call: Pass, do: Tensor, dlse: Tensor | None, saved: Saved, wanted: Collection[str]
) -> Gradients:
    """Returns the gradients; those of options are None unless they are `wanted`."""
    operands, lse = prepare_backward(call, do, dlse, saved), saved.row_stats[0]
    dk, dv = bwd_dkdv(call, operands, saved.block_mask)
    dq = bwd_dq(call, operands, saved.block_mask)
    dbias = gradient_of_bias(call, operands, dlse, lse) if "bias" in wanted else None
    drelative, dkeys = None, None
    if "relative_bias" in wanted:
        drelative = gradient_of_relative_bias(call, operands, saved.block_mask)
    if "relative_keys" in wanted:
        dkeys = gradient_of_relative_keys(call, operands, saved.block_mask)
    return Gradients(dq, dk, dv, dbias, drelative, dkeys)


def prepare_backward(call: Pass, do: Tensor, dlse: Tensor | None, saved: Saved) -> Operands:
    """Runs the backward preprocess, `bwd_preprocess_kernel`, and packs the kernels' operands."""
    p = call.problem.shape
    o, do = as_rows(saved.o), as_rows(do)
    lse, lse_rest = saved.row_stats.contiguous()
    statistics = Statistics(*(torch.empty_like(lse) for _ in Statistics._fields))
    block = 64
    launch(
        bwd_preprocess_kernel,
        call.blocks_of(p.M, block, p.H_q),
        arguments.rows(o),
        arguments.rows(do),
        lse,
        lse_rest,
        None if dlse is None else dlse.contiguous(),
        statistics,
        *call.scalars[:3],
        call.heads,
        call.sequences,
        D_V=p.D_v,
        BLOCK_M=block,
        BLOCK_DV=config.width(p.D_v),
    )
    q, k, v = map(arguments.rows, (call.q, call.k, call.v))
    return Operands(q, k, v, arguments.rows(do), statistics)


def bwd_dkdv(call: Pass, operands: Operands, block_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    dk, dv = (call.output(x, x.shape[-1]) for x in (call.k, call.v))
    tensors = (*operands, arguments.rows(dk), arguments.rows(dv))
    launch_blocks(bwd_dkdv_kernel, "bwd_dkdv", call, tensors, block_mask, by_keys=True)
    return dk, dv


def bwd_dq(call: Pass, operands: Operands, block_mask: Tensor | None) -> Tensor:
    dq = call.output(call.q, call.problem.shape.D)
    launch_blocks(bwd_dq_kernel, "bwd_dq", call, (*operands, arguments.rows(dq)), block_mask)
    return dq


def launch_blocks(
    kernel: Any,
    name: Kernel,
    call: Pass,
    tensors: tuple[Any, ...],
    block_mask: Tensor | None,
    options: tuple[Any, ...] = (),
    *,
    by_keys: bool = False,
) -> None:
    """Launches one program per query block, or per key block, of every head. `options` are those
    of this kernel alone."""
    p = call.problem.shape
    tile, sizes = tiling(name, call.problem)
    rows, heads = (p.N, p.H_kv) if by_keys else (p.M, p.H_q)
    launch(
        kernel,
        call.blocks_of(rows, tile.block_n if by_keys else tile.block_m, heads),
        *tensors,
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, block_mask, tile, by_keys=by_keys),
        call.scores,
        call.dropout,
        *options,
        sizes,
        **resources(tile),
    )


def gradient_of_bias(call: Pass, operands: Operands, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Returns dbias, with the shape and dtype of the bias."""
    p, bias = call.problem.shape, call.problem.scores.bias
    assert bias is not None
    own_b, own_h, rows, columns = bias.shape
    if columns == 1 != p.N:
        return _reduced(_row_sums(operands.statistics.delta, dlse, lse)[..., None], bias)
    tile, sizes = tiling("bias_gradient", call.problem)
    options = (*call.scalars[:6], call.heads, call.mask, call.scores, call.dropout)
    if rows == 1 != p.M:
        sums = torch.empty(p.B, p.H_q, p.N, dtype=torch.float32, device=bias.device)
        programs = call.blocks_of(p.N, tile.block_n, p.H_q)
        launch(column_sums_kernel, programs, *operands, sums, *options, sizes, **resources(tile))
        return _reduced(sums[:, :, None], bias)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    programs = -(-p.M // tile.block_m) * -(-p.N // tile.block_n) * own_b * own_h
    given = (*operands, arguments.rows(dbias), *options, p.B, own_b, own_h, sizes)
    launch(tile_sums_kernel, programs, *given, **resources(tile))
    return dbias


def _row_sums(delta: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Row sums of ds, which equal dlse: p sums to 1, and p dp to delta. delta * 0 keeps NaN."""
    sums = delta * 0.0 if dlse is None else dlse + delta * 0.0
    return sums.masked_fill(lse == float("-inf"), 0.0)


def _reduced(sums: Tensor, bias: Tensor) -> Tensor:
    over = [n for n, size in enumerate(bias.shape) if size == 1 and sums.shape[n] != 1]
    return (sums.sum(over, keepdim=True) if over else sums).to(bias.dtype)


def gradient_of_relative_bias(call: Pass, operands: Operands, block_mask: Tensor | None) -> Tensor:
    """Returns drelative_bias, (H_q or 1, distances) float32."""
    p, table = call.problem.shape, call.problem.scores.relative_bias
    assert table is not None
    tile, sizes = tiling("relative_gradient", call.problem)
    sums = torch.zeros((p.B, p.H_q, 2, table.shape[1]), dtype=torch.float32, device=table.device)
    side = tile.block_m
    strips = max(-(-p.M // side) + -(-p.N // side) - 1, 0)
    block_mask = block_mask if call.problem.mask.has_element_mask else None
    launch(
        strip_sums_kernel,
        strips * p.H_q * p.B,
        *operands,
        sums,
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_mask,
        tuple(arguments.broadcast_strides(block_mask, 4)[:3]),
        call.scores,
        call.dropout,
        sizes,
        **resources(tile),
    )
    return sums.sum((0, 2)) if table.shape[0] > 1 else sums.sum((0, 1, 2))[None]


def gradient_of_relative_keys(call: Pass, operands: Operands, block_mask: Tensor | None) -> Tensor:
    """Returns drelative_keys, (H_q or 1, distances, D) in q's dtype."""
    p, keys = call.problem.shape, call.problem.scores.relative_keys
    assert keys is not None
    if 0 in (p.B, p.M, p.N):
        return torch.zeros_like(keys)
    tile, sizes = tiling("keys_gradient", call.problem)
    own_h, side = keys.shape[0], tile.block_m
    programs = (-(-(p.N - 1) // side) + -(-p.M // side)) * own_h
    splits = min(p.B * p.H_q // own_h, -(-MIN_PROGRAMS // programs))
    sums = torch.empty((splits, *keys.shape), dtype=torch.float32, device=keys.device)
    block_mask = block_mask if call.problem.mask.has_element_mask else None
    launch(
        distance_sums_kernel,
        programs * splits,
        *operands,
        sums,
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_mask,
        tuple(arguments.broadcast_strides(block_mask, 4)[:3]),
        call.scores,
        call.dropout,
        p.B,
        own_h,
        splits,
        sizes,
        **resources(tile),
    )
    return sums.sum(0).to(keys.dtype)


def fill_block_mask(call: Pass) -> Tensor:
    """Returns the block mask, one byte for each 64 x 64 block (kernels/block_lists.py)."""
    M, N, mask = call.problem.shape.M, call.problem.shape.N, call.problem.mask
    shape = mask.block_mask_shape(M, N)
    block_mask = call.q.new_empty(shape, dtype=torch.uint8)
    if mask.has_element_mask:
        given = (block_mask, M, N, call.mask, shape[1])
        launch(block_mask_kernel, block_mask.numel(), *given, BLOCK=BLOCK_MASK_SIZE)
    return block_mask


def block_lists(call: Pass, block_mask: Tensor | None, tile: Tile, *, by_keys: bool) -> BlockLists:
    """Builds the block lists of query (or key) blocks; NO_LISTS without a block mask."""
    if block_mask is None or not call.problem.mask.has_element_mask:
        return NO_LISTS
    p, row_grain, key_grain = call.problem.shape, *arguments.grains(tile)
    rows, columns = -(-p.M // row_grain), -(-p.N // key_grain)
    if by_keys:
        rows, columns = columns, rows
    by_batch = block_mask.shape[0] > 1 or call.mask.key_end is not None
    own_b, own_h = p.B if by_batch else 1, block_mask.shape[1]
    indices = block_mask.new_empty(own_b, own_h, rows, columns, dtype=torch.int32)
    counts = block_mask.new_empty(own_b, own_h, rows, 2, dtype=torch.int32)
    lists = BlockLists(
        indices,
        counts,
        stride_b=own_h * rows if own_b > 1 else 0,
        stride_h=rows if own_h > 1 else 0,
        columns=columns,
    )
    launch(
        list_kernel,
        own_b * own_h * rows,
        block_mask,
        tuple(arguments.broadcast_strides(block_mask, 4)[:3]),
        lists,
        *call.scalars[1:5],
        call.mask,
        own_h,
        BLOCK_M=row_grain,
        BLOCK_N=key_grain,
        BY_KEYS=by_keys,
    )
    return lists


def tiling(kernel: Kernel, problem: Problem) -> tuple[Tile, arguments.Sizes]:
    """Returns the tile of a kernel, and the sizes that follow from it and the widths."""
    shape = problem.shape
    chip = target.chip(shape.device)
    columns = max(config.width(shape.D), config.width(shape.D_v))
    if problem.scores.relative_keys is not None:
        kernel = config.WITH_KEYS.get(kernel, kernel)
    loaded = scores.bytes_per_score(problem.scores) + masks.bytes_per_score(problem.mask)
    if problem.layout.has_packed_pages:  # addresses of keys take registers, as do loads per score
        loaded = max(loaded, 1)
    positions = masks.bytes_per_key(problem.mask)
    tile = config.tile(kernel, chip, shape.dtype.itemsize, columns, loaded, positions)
    assert tile is not None  # checked by unsupported_reasons
    precision = config.precision(chip, columns)
    return tile, arguments.sizes(shape.D, shape.D_v, tile, precision)


def resources(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def as_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy if its rows are not unit-stride or lie too far apart for 32-bit offsets
    inside a tile."""
    unit_stride = x.stride(-1) == 1 or x.shape[-1] == 1
    fits_32_bits = x.stride(-2) < MAX_ROW_STRIDE or x.shape[-2] == 1
    return x if unit_stride and fits_32_bits else x.contiguous()


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Launches the kernel on the current stream, unless the grid is empty (an error in Triton).

    Multiplications are not fused with subtractions, which would skip the rounding of a scaled
    score: docs/attention.md, section 8.
    """
    if programs:
        kernel[(programs,)](*args, enable_fp_fusion=False, **options)
