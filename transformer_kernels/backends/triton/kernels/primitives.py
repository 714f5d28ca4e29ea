"""Helpers shared by the forward and backward kernels: addresses, loads, stores and scores.

Index tensors i (queries) and j (keys) broadcast to a tile in either orientation: (BLOCK_M, 1) with
(1, BLOCK_N), or (1, BLOCK_M) with (BLOCK_N, 1) where the tile is transposed.
"""

# No `from __future__ import annotations`: Triton needs annotations as objects, not as strings.
import triton
import triton.language as tl

UNSPECIALIZED = ["rows", "M", "N", "low", "high", "offset", "rows_k"]
"""Kernel arguments that change from call to call, exempt from Triton's specialization. Otherwise a
value of 1 or a multiple of 16 would compile another kernel."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence(sequences, b, M, N, rows, rows_k):
    """(batch index in memory, first query row, first key row, M, N) of sequence b"""
    if sequences.cu_q is None:
        return b, 0, 0, M, N
    else:
        first_q, M = sequence_rows(sequences.cu_q + b, rows)
        first_k, N = sequence_rows(sequences.cu_k + b, rows_k)
        return 0, first_q, first_k, M, N


@triton.jit
def sequence_rows(starts, rows):
    """(first row, number of rows) of a sequence. The offsets are on the device and not validated:
    clamped to the rows in memory."""
    first = tl.minimum(tl.maximum(tl.load(starts), 0), rows)
    return first, tl.maximum(tl.minimum(tl.load(starts + 1), rows) - first, 0)


@triton.jit
def resolve_alignment(sequences, low, high, offset, M, N):
    """low, high and the ALiBi offset, relative to the first query and the first key"""
    shift = sequences.bottom_right * (N - M)
    return low + shift, high + shift, offset + shift


@triton.jit
def head_pointer(rows, b, h, first):
    """Pointer to row `first` of head h; 64-bit offsets"""
    return (
        rows.data
        + tl.cast(b, tl.int64) * rows.stride_b
        + tl.cast(h, tl.int64) * rows.stride_h
        + tl.cast(first, tl.int64) * rows.stride_l
    )


@triton.jit
def vector_pointer(data, heads, rows, b, h, first):
    """Pointer to element `first` of head h in a contiguous (B, H_q, rows) tensor"""
    return data + (tl.cast(b, tl.int64) * heads.H_q + h) * rows + first


@triton.jit
def load_rows(
    head,
    stride,
    first,
    in_bounds,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """(ROWS, BLOCK) tile from row `first` of a head. Columns beyond WIDTH are 0; if CHECKED, rows
    that are not `in_bounds` are 0 too."""
    at = tile_addresses(head, stride, first, ROWS, BLOCK)
    columns = tl.arange(0, BLOCK)[None, :] < WIDTH
    if CHECKED:
        if WIDTH == BLOCK:
            return tl.load(at, mask=in_bounds[:, None], other=0.0)
        else:
            return tl.load(at, mask=in_bounds[:, None] & columns, other=0.0)
    else:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, mask=columns, other=0.0)


@triton.jit
def store_rows(head, stride, first, in_bounds, tile, WIDTH: tl.constexpr):
    """Stores the first WIDTH columns of the tile's rows that are `in_bounds`"""
    at = tile_addresses(head, stride, first, tile.shape[0], tile.shape[1])
    columns = tl.arange(0, tile.shape[1])[None, :] < WIDTH
    tl.store(at, tile.to(head.dtype.element_ty), mask=in_bounds[:, None] & columns)


@triton.jit
def tile_addresses(head, stride, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) pointers: a scalar base, which is all a loop advances, plus fixed offsets"""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return head + tl.cast(first, tl.int64) * stride + (row * stride + column)


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
    """a of docs/attention.md: scale * q k^T, with softcap"""
    a = products * scores.scale
    if scores.softcap is not None:
        a = scores.softcap * tanh(a / scores.softcap)
    return a


@triton.jit
def load_bias(scores, b, h, i, j, M, N):
    """Bias tile, 0 outside M x N"""
    by_b, by_h = tl.cast(b, tl.int64) * scores.bias_b, tl.cast(h, tl.int64) * scores.bias_h
    by_i, by_j = i.to(tl.int64) * scores.bias_i, j.to(tl.int64) * scores.bias_j
    at = scores.bias + by_b + by_h + by_i + by_j
    return tl.load(at, mask=(i < M) & (j < scores.columns), other=0.0)


@triton.jit
def natural_scores(products, bias, scores, offset, h, i, j):
    """s of docs/attention.md, natural units, not masked"""
    s = scaled(products, scores)
    if bias is not None:
        s += bias.to(tl.float32)
    if scores.slopes is not None:
        s -= tl.load(scores.slopes + h) * tl.abs(i + offset - j).to(tl.float32)
    return s


@triton.jit
def unscaled_scores(products, bias, scores, offset, h, i, j):
    """Scores that the softmax converts by `log2_unit` and `natural_unit`: products if nothing but a
    scale is applied to them"""
    if scores.plain_scale is not None:
        return products
    else:
        return natural_scores(products, bias, scores, offset, h, i, j)


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
