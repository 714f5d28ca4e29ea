"""Host side of a pass: allocates outputs, selects tiles and launches the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.backends.triton import config, interpreter, kernel_args, target
from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.backends.triton.kernel_args import NO_LISTS, BlockLists
from transformer_kernels.backends.triton.kernels.backward import (
    bwd_dkdv_kernel,
    bwd_dq_kernel,
)
from transformer_kernels.backends.triton.kernels.bias_gradient import (
    column_sums_kernel,
    tile_sums_kernel,
)
from transformer_kernels.backends.triton.kernels.block_lists import block_mask_kernel, list_kernel
from transformer_kernels.backends.triton.kernels.forward import forward_kernel
from transformer_kernels.backends.triton.kernels.score_gradient import bwd_preprocess_kernel
from transformer_kernels.problem import AttentionProblem, SavedForBackward, TensorArgs

if interpreter.is_on():
    interpreter.patch()


MAX_ROW_STRIDE = 1 << 24
"""Largest row stride, in elements, for which offsets inside a tile fit in 32 bits."""


class Call(NamedTuple):
    """Inputs of one pass, with unit-stride rows, and the kernel arguments made from its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    tensor_args: TensorArgs
    problem: AttentionProblem
    scalars: kernel_args.Scalars
    mask: kernel_args.MaskTensors
    scores: kernel_args.Scores
    dropout: kernel_args.Dropout

    @property
    def sequences(self) -> kernel_args.Sequences:
        args, bottom_right = self.tensor_args, int(self.problem.bottom_right)
        return kernel_args.Sequences(args.cu_seqlens_q, args.cu_seqlens_k, bottom_right)

    @property
    def heads(self) -> kernel_args.Heads:
        return kernel_args.Heads(self.problem.H_q, self.problem.H_q // self.problem.H_kv)

    def output(self, like: Tensor, width: int) -> Tensor:
        """Allocates (B, H, L, width): zeros for varlen calls, whose trailing padding is not
        written, else uninitialized."""
        x = schema.empty_like_layout(like, width)
        return x if self.tensor_args.cu_seqlens_q is None else x.zero_()

    def blocks_of(self, rows: int, block: int, heads: int) -> int:
        """Number of programs that cover `rows` in blocks of `block`, for all heads and batches."""
        return -(-rows // block) * heads * self.problem.B


class Operands(NamedTuple):
    """Leading arguments of every backward kernel, in order."""

    q: kernel_args.Rows
    k: kernel_args.Rows
    v: kernel_args.Rows
    do: kernel_args.Rows
    base: Tensor
    delta: Tensor


def prepare(
    q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
) -> Call:
    return Call(
        as_rows(q),
        as_rows(k),
        as_rows(v),
        tensor_args,
        problem,
        kernel_args.scalars(q, k, problem),
        kernel_args.mask_tensors(tensor_args, problem),
        kernel_args.scores(tensor_args, problem, problem.scale),
        kernel_args.dropout(tensor_args, problem),
    )


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (o, lse, block_mask); the block mask has no elements if the mask needs none."""
    p = call.problem
    o = call.output(call.q, p.D_v)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    if call.tensor_args.cu_seqlens_q is not None:
        lse.fill_(float("-inf"))
    block_mask = fill_block_mask(call)
    q, scores = call.q, call.scores
    if p.scale < 0.0:  # the kernel computes row maxima before scaling, which needs scale >= 0
        q, scores = -q, kernel_args.scores(call.tensor_args, p, -p.scale)
    tile, meta = tiling("forward", call)
    launch(
        forward_kernel,
        call.blocks_of(p.M, tile.block_m, p.H_q),
        *map(kernel_args.rows, (q, call.k, call.v, o)),
        lse,
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, block_mask, tile, by_keys=False),
        scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return o, lse, block_mask


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, saved: SavedForBackward, bias_needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns (dq, dk, dv, dbias); dbias is None unless `bias_needs_grad`."""
    operands = prepare_backward(call, do, dlse, saved)
    dk, dv = bwd_dkdv(call, operands, saved.block_mask)
    dq = bwd_dq(call, operands, saved.block_mask)
    dbias = None
    if bias_needs_grad and call.tensor_args.bias is not None:
        dbias = gradient_of_bias(call, operands, dlse, saved.lse)
    return dq, dk, dv, dbias


def prepare_backward(
    call: Call, do: Tensor, dlse: Tensor | None, saved: SavedForBackward
) -> Operands:
    """Runs the backward preprocess, `bwd_preprocess_kernel`, and packs the kernels' operands."""
    p = call.problem
    o, do, lse = as_rows(saved.o), as_rows(do), saved.lse.contiguous()
    base, delta = torch.empty_like(lse), torch.empty_like(lse)
    block = 64
    launch(
        bwd_preprocess_kernel,
        call.blocks_of(p.M, block, p.H_q),
        kernel_args.rows(o),
        kernel_args.rows(do),
        lse,
        None if dlse is None else dlse.contiguous(),
        base,
        delta,
        *call.scalars[:3],
        call.heads,
        call.sequences,
        D_V=p.D_v,
        BLOCK_M=block,
        BLOCK_DV=config.width(p.D_v),
    )
    q, k, v = map(kernel_args.rows, (call.q, call.k, call.v))
    return Operands(q, k, v, kernel_args.rows(do), base, delta)


def bwd_dkdv(call: Call, operands: Operands, block_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    p = call.problem
    dk, dv = (call.output(x, x.shape[-1]) for x in (call.k, call.v))
    tile, meta = tiling("bwd_dkdv", call)
    launch(
        bwd_dkdv_kernel,
        call.blocks_of(p.N, tile.block_n, p.H_kv),
        *operands,
        kernel_args.rows(dk),
        kernel_args.rows(dv),
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, block_mask, tile, by_keys=True),
        call.scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return dk, dv


def bwd_dq(call: Call, operands: Operands, block_mask: Tensor | None) -> Tensor:
    p = call.problem
    dq = call.output(call.q, p.D)
    tile, meta = tiling("bwd_dq", call)
    launch(
        bwd_dq_kernel,
        call.blocks_of(p.M, tile.block_m, p.H_q),
        *operands,
        kernel_args.rows(dq),
        *call.scalars,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, block_mask, tile, by_keys=False),
        call.scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return dq


def gradient_of_bias(call: Call, operands: Operands, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Returns dbias, with the shape and dtype of the bias."""
    p, bias = call.problem, call.tensor_args.bias
    assert bias is not None
    own_b, own_h, rows, columns = bias.shape
    tile, meta = tiling("bias_gradient", call)
    options = (*call.scalars[:6], call.heads, call.mask, call.scores, call.dropout)
    if columns == 1 != p.N:
        return _reduced(_row_sums(operands.delta, dlse, lse)[..., None], bias)
    if rows == 1 != p.M:
        sums = torch.empty(p.B, p.H_q, p.N, dtype=torch.float32, device=bias.device)
        launch(
            column_sums_kernel,
            call.blocks_of(p.N, tile.block_n, p.H_q),
            *operands,
            sums,
            *options,
            **meta,
        )
        return _reduced(sums[:, :, None], bias)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    tiles = -(-p.M // tile.block_m) * -(-p.N // tile.block_n)
    launch(
        tile_sums_kernel,
        tiles * own_b * own_h,
        *operands,
        kernel_args.rows(dbias),
        *options,
        p.B,
        own_b,
        own_h,
        **meta,
    )
    return dbias


def _row_sums(delta: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Row sums of ds, which equal dlse: p sums to 1, and p dp to delta. delta * 0 keeps NaN."""
    sums = delta * 0.0 if dlse is None else dlse + delta * 0.0
    return sums.masked_fill(lse == float("-inf"), 0.0)


def _reduced(sums: Tensor, bias: Tensor) -> Tensor:
    over = [n for n, size in enumerate(bias.shape) if size == 1 and sums.shape[n] != 1]
    return (sums.sum(over, keepdim=True) if over else sums).to(bias.dtype)


def fill_block_mask(call: Call) -> Tensor:
    """Returns the block mask, one byte for each 64 x 64 block (kernels/block_lists.py)."""
    tensor_args = call.tensor_args
    shape = schema.block_mask_shape(
        call.q, call.k, tensor_args.q_segments, tensor_args.dense, tensor_args.layout
    )
    block_mask = call.q.new_empty(shape, dtype=torch.uint8)
    if schema.needs_block_mask(tensor_args):
        launch(
            block_mask_kernel,
            block_mask.numel(),
            block_mask,
            call.problem.M,
            call.problem.N,
            call.mask,
            shape[1],
            BLOCK=schema.BLOCK_MASK_SIZE,
        )
    return block_mask


def block_lists(call: Call, block_mask: Tensor | None, tile: Tile, *, by_keys: bool) -> BlockLists:
    """Builds the block lists of query (or key) blocks; NO_LISTS without a block mask."""
    if block_mask is None or not schema.needs_block_mask(call.tensor_args):
        return NO_LISTS
    p, grain = call.problem, grains(tile)
    rows = -(-p.M // grain["ROW_GRAIN"])
    columns = -(-p.N // grain["KEY_GRAIN"])
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
        kernel_args.broadcast_strides(block_mask)[:3],
        lists,
        *call.scalars[1:5],
        call.mask,
        own_h,
        BLOCK_M=grain["ROW_GRAIN"],
        BLOCK_N=grain["KEY_GRAIN"],
        BY_KEYS=by_keys,
    )
    return lists


def tiling(kernel: Kernel, call: Call) -> tuple[Tile, dict[str, Any]]:
    """Returns the tile, and the compile-time arguments that follow from it and the widths."""
    p = call.problem
    block_d, block_dv = config.width(p.D), config.width(p.D_v)
    chip = target.chip(p.device)
    columns = max(block_d, block_dv)
    tile = config.tile(
        kernel, chip, call.q.element_size(), columns, kernel_args.score_bytes(call.tensor_args)
    )
    assert tile is not None  # checked by unsupported_reasons
    return tile, {
        "D": p.D,
        "D_V": p.D_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "PRECISION": config.precision(chip, columns),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def grains(tile: Tile) -> dict[str, int]:
    """Block size of the block lists: the tile's, or the block mask's if that is larger."""
    return {
        "ROW_GRAIN": max(tile.block_m, schema.BLOCK_MASK_SIZE),
        "KEY_GRAIN": max(tile.block_n, schema.BLOCK_MASK_SIZE),
    }


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
