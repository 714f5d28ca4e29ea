"""The host side: outputs, tiles, and the launches of a forward or a backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.backends.triton import config, interpreter, target
from transformer_kernels.backends.triton import kernel_args as arguments
from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.backends.triton.kernel_args import NO_LISTS, BlockLists
from transformer_kernels.backends.triton.kernels.backward import (
    key_gradients_kernel,
    query_gradients_kernel,
)
from transformer_kernels.backends.triton.kernels.bias_gradient import (
    column_sums_kernel,
    tile_sums_kernel,
)
from transformer_kernels.backends.triton.kernels.block_lists import list_kernel, summary_kernel
from transformer_kernels.backends.triton.kernels.forward import forward_kernel
from transformer_kernels.backends.triton.kernels.score_gradient import row_terms_kernel
from transformer_kernels.problem import AttentionProblem, Extras, SavedForBackward

if interpreter.is_on():
    interpreter.mend()


MAX_ROW_STRIDE = 1 << 24
"""elements; times the rows of the largest tile it fits 32 bits"""


class Call(NamedTuple):
    """One pass: its inputs, as rows, and what every kernel takes of the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    problem: AttentionProblem
    numbers: arguments.Numbers
    mask: arguments.MaskTensors
    scores: arguments.Scores
    dropout: arguments.Dropout

    @property
    def sequences(self) -> arguments.Sequences:
        packed = self.extras
        from_end = int(self.problem.from_end)
        return arguments.Sequences(packed.cu_seqlens_q, packed.cu_seqlens_k, from_end)

    @property
    def heads(self) -> arguments.Heads:
        return arguments.Heads(self.problem.H_q, self.problem.H_q // self.problem.H_kv)

    def output(self, like: Tensor, width: int) -> Tensor:
        """(B, H, L, width); zeros for packed sequences, as rows behind the last one stay so."""
        x = schema.empty_like_layout(like, width)
        return x if self.extras.cu_seqlens_q is None else x.zero_()

    def blocks_of(self, rows: int, block: int, heads: int) -> int:
        """How many programs take `block` of `rows` each, in every head of every batch entry."""
        return -(-rows // block) * heads * self.problem.B


class Operands(NamedTuple):
    """What every backward kernel reads, in the order in which they take it."""

    q: arguments.Rows
    k: arguments.Rows
    v: arguments.Rows
    do: arguments.Rows
    base: Tensor
    delta: Tensor


def prepare(q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem) -> Call:
    return Call(
        as_rows(q),
        as_rows(k),
        as_rows(v),
        extras,
        problem,
        arguments.numbers(q, problem),
        arguments.mask_tensors(extras, problem),
        arguments.scores(extras, problem, problem.scale),
        arguments.dropout(extras, problem),
    )


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, block summary); the summary is empty for a mask that needs none."""
    p = call.problem
    o = call.output(call.q, p.D_v)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    if call.extras.cu_seqlens_q is not None:
        lse.fill_(float("-inf"))
    summary = summarize(call)
    q, scores = call.q, call.scores
    if p.scale < 0.0:  # the kernel takes a row's maximum before it scales
        q, scores = -q, arguments.scores(call.extras, p, -p.scale)
    tile, meta = tiling("forward", call)
    launch(
        forward_kernel,
        call.blocks_of(p.M, tile.block_m, p.H_q),
        *map(arguments.rows, (q, call.k, call.v, o)),
        lse,
        *call.numbers,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, summary, tile, by_keys=False),
        scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return o, lse, summary


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, saved: SavedForBackward, bias_needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dbias)."""
    operands = prepare_backward(call, do, dlse, saved)
    dk, dv = key_gradients(call, operands, saved.block_summary)
    dq = query_gradients(call, operands, saved.block_summary)
    dbias = None
    if bias_needs_grad and call.extras.bias is not None:
        dbias = gradient_of_bias(call, operands, dlse, saved.lse)
    return dq, dk, dv, dbias


def prepare_backward(
    call: Call, do: Tensor, dlse: Tensor | None, saved: SavedForBackward
) -> Operands:
    """Computes what each row brings into all its tiles: see `row_terms_kernel`."""
    p = call.problem
    o, do, lse = as_rows(saved.o), as_rows(do), saved.lse.contiguous()
    base, delta = torch.empty_like(lse), torch.empty_like(lse)
    block = 64
    launch(
        row_terms_kernel,
        call.blocks_of(p.M, block, p.H_q),
        arguments.rows(o),
        arguments.rows(do),
        lse,
        None if dlse is None else dlse.contiguous(),
        base,
        delta,
        *call.numbers[:3],
        call.heads,
        call.sequences,
        D_V=p.D_v,
        BLOCK_M=block,
        BLOCK_DV=config.width(p.D_v),
        EXACT=o.dtype == torch.float32,
    )
    q, k, v = map(arguments.rows, (call.q, call.k, call.v))
    return Operands(q, k, v, arguments.rows(do), base, delta)


def key_gradients(call: Call, operands: Operands, summary: Tensor | None) -> tuple[Tensor, Tensor]:
    p = call.problem
    dk, dv = (call.output(x, x.shape[-1]) for x in (call.k, call.v))
    tile, meta = tiling("key_gradients", call)
    launch(
        key_gradients_kernel,
        call.blocks_of(p.N, tile.block_n, p.H_kv),
        *operands,
        arguments.rows(dk),
        arguments.rows(dv),
        *call.numbers,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, summary, tile, by_keys=True),
        call.scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return dk, dv


def query_gradients(call: Call, operands: Operands, summary: Tensor | None) -> Tensor:
    p = call.problem
    dq = call.output(call.q, p.D)
    tile, meta = tiling("query_gradients", call)
    launch(
        query_gradients_kernel,
        call.blocks_of(p.M, tile.block_m, p.H_q),
        *operands,
        arguments.rows(dq),
        *call.numbers,
        call.heads,
        call.sequences,
        call.mask,
        block_lists(call, summary, tile, by_keys=False),
        call.scores,
        call.dropout,
        **meta,
        **grains(tile),
    )
    return dq


def gradient_of_bias(call: Call, operands: Operands, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """dbias, of the bias's shape and dtype."""
    p, bias = call.problem, call.extras.bias
    assert bias is not None
    own_b, own_h, rows, columns = bias.shape
    tile, meta = tiling("bias_gradient", call)
    options = (*call.numbers, call.heads, call.mask, call.scores, call.dropout)
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
        arguments.rows(dbias),
        *options,
        p.B,
        own_b,
        own_h,
        **meta,
    )
    return dbias


def _row_sums(delta: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Rows of ds sum to dlse: weights sum to 1, and p dp to delta. NaN comes through delta."""
    sums = delta * 0.0 if dlse is None else dlse + delta * 0.0
    return sums.masked_fill(lse == float("-inf"), 0.0)


def _reduced(sums: Tensor, bias: Tensor) -> Tensor:
    over = [n for n, size in enumerate(bias.shape) if size == 1 and sums.shape[n] != 1]
    return (sums.sum(over, keepdim=True) if over else sums).to(bias.dtype)


def summarize(call: Call) -> Tensor:
    """A byte for each block of 64 x 64 (block_lists.py)."""
    extras = call.extras
    shape = schema.summary_shape(call.q, call.k, extras.q_segments, extras.dense, extras.layout)
    summary = call.q.new_empty(shape, dtype=torch.uint8)
    if schema.needs_summary(extras):
        launch(
            summary_kernel,
            summary.numel(),
            summary,
            call.problem.M,
            call.problem.N,
            call.mask,
            shape[1],
            BLOCK=schema.SUMMARY_BLOCK,
        )
    return summary


def block_lists(call: Call, summary: Tensor | None, tile: Tile, *, by_keys: bool) -> BlockLists:
    """Which blocks each block of queries visits, or of keys; none are needed without a summary."""
    if summary is None or not schema.needs_summary(call.extras):
        return NO_LISTS
    p, grain = call.problem, grains(tile)
    rows = -(-p.M // grain["ROW_GRAIN"])
    columns = -(-p.N // grain["KEY_GRAIN"])
    if by_keys:
        rows, columns = columns, rows
    by_batch = summary.shape[0] > 1 or call.mask.key_end is not None
    own_b, own_h = p.B if by_batch else 1, summary.shape[1]
    indices = summary.new_empty(own_b, own_h, rows, columns, dtype=torch.int32)
    counts = summary.new_empty(own_b, own_h, rows, 2, dtype=torch.int32)
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
        summary,
        arguments.broadcast_strides(summary)[:3],
        lists,
        *call.numbers[1:5],
        call.mask,
        own_h,
        BLOCK_M=grain["ROW_GRAIN"],
        BLOCK_N=grain["KEY_GRAIN"],
        BY_KEYS=by_keys,
    )
    return lists


def tiling(kernel: Kernel, call: Call) -> tuple[Tile, dict[str, Any]]:
    """The tile, and what it and the widths mean for a kernel's compilation."""
    p = call.problem
    block_d, block_dv = config.width(p.D), config.width(p.D_v)
    chip = target.chip(p.device)
    columns = max(block_d, block_dv)
    tile = config.tile(
        kernel, chip, call.q.element_size(), columns, arguments.score_bytes(call.extras)
    )
    assert tile is not None  # the backend has said no where there is none
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
    """What block lists count in: blocks of the tile, or of the summary where those are larger."""
    return {
        "ROW_GRAIN": max(tile.block_m, schema.SUMMARY_BLOCK),
        "KEY_GRAIN": max(tile.block_n, schema.SUMMARY_BLOCK),
    }


def as_rows(x: Tensor) -> Tensor:
    """x with a row's elements side by side, and rows near enough for 32-bit offsets inside a tile:
    itself, or a copy."""
    side_by_side = x.stride(-1) == 1 or x.shape[-1] == 1
    near = x.stride(-2) < MAX_ROW_STRIDE or x.shape[-2] == 1
    return x if side_by_side and near else x.contiguous()


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Runs so many programs on the current stream; an empty grid would be an error."""
    if programs:
        kernel[(programs,)](*args, **options)
