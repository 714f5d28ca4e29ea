"""What forward and backward share: addresses, loads, scores and their exponents.

Index tensors i (queries) and j (keys) broadcast to a tile in either orientation: (BLOCK_M, 1) with
(1, BLOCK_N), or (1, BLOCK_M) with (BLOCK_N, 1) where the tile is transposed.
"""

# Annotations of a kernel must be objects, not text: no `from __future__ import annotations` here.
import triton
import triton.language as tl

NUMBERS = ["rows", "M", "N", "low", "high", "offset"]
"""Arguments that change from call to call. Triton would compile a kernel anew where one of them is
1 or a multiple of 16; it is told not to."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence(sequences, b, M, N):
    """(index of b in memory, its first query, its first key, M, N)"""
    if sequences.cu_q is None:
        return b, 0, 0, M, N
    else:
        first_q, first_k = tl.load(sequences.cu_q + b), tl.load(sequences.cu_k + b)
        M = tl.load(sequences.cu_q + b + 1) - first_q
        N = tl.load(sequences.cu_k + b + 1) - first_k
        return 0, first_q, first_k, M, N


@triton.jit
def from_start(sequences, low, high, offset, M, N):
    """low, high and ALiBi's offset, counted from the first query and the first key"""
    shift = sequences.bottom_right * (N - M)
    return low + shift, high + shift, offset + shift


@triton.jit
def matrix(rows, b, h, first):
    """The address of row `first` of head h; offsets beyond 2^31 elements are fine."""
    return (
        rows.data
        + tl.cast(b, tl.int64) * rows.stride_b
        + tl.cast(h, tl.int64) * rows.stride_h
        + tl.cast(first, tl.int64) * rows.stride_l
    )


@triton.jit
def vector(numbers, heads, rows, b, h, first):
    """The address of the number of row `first` of head h, of (B, H_q, rows) without gaps"""
    return numbers + (tl.cast(b, tl.int64) * heads.H_q + h) * rows + first


@triton.jit
def load_rows(
    head,
    stride,
    first,
    there,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """(ROWS, BLOCK) from row `first` of a head: 0 beyond the WIDTH and, if CHECKED, where not
    `there`"""
    at = tile_addresses(head, stride, first, ROWS, BLOCK)
    columns = tl.arange(0, BLOCK)[None, :] < WIDTH
    if CHECKED:
        if WIDTH == BLOCK:
            return tl.load(at, mask=there[:, None], other=0.0)
        else:
            return tl.load(at, mask=there[:, None] & columns, other=0.0)
    else:
        if WIDTH == BLOCK:
            return tl.load(at)
        else:
            return tl.load(at, mask=columns, other=0.0)


@triton.jit
def store_rows(head, stride, first, there, tile, WIDTH: tl.constexpr):
    """The first WIDTH columns of the tile's rows that are `there`"""
    at = tile_addresses(head, stride, first, tile.shape[0], tile.shape[1])
    columns = tl.arange(0, tile.shape[1])[None, :] < WIDTH
    tl.store(at, tile.to(head.dtype.element_ty), mask=there[:, None] & columns)


@triton.jit
def tile_addresses(head, stride, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS). The first row's is a scalar, so that a loop moves one number."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    return head + tl.cast(first, tl.int64) * stride + (row * stride + column)


@triton.jit
def tanh(x):
    """To some units in the last place everywhere: (1 - t) / (1 + t) cancels near 0"""
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    y = x * x
    # The odd Taylor series, whose next term is under 2^-26 of the first for |x| < 0.35.
    near = 1.0 + y * (
        -1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 + y * (-1382 / 155925))))
    )
    return tl.where(tl.abs(x) < 0.35, x * near, tl.where(x < 0, -far, far))


@triton.jit
def scaled(products, scores):
    """a of docs/attention.md: scale times q k, under the cap"""
    a = products * scores.scale
    if scores.softcap is not None:
        a = scores.softcap * tanh(a / scores.softcap)
    return a


@triton.jit
def load_bias(scores, b, h, i, j, M, N):
    """The tile of a bias there is, 0 outside M x N"""
    by_b, by_h = tl.cast(b, tl.int64) * scores.bias_b, tl.cast(h, tl.int64) * scores.bias_h
    by_i, by_j = i.to(tl.int64) * scores.bias_i, j.to(tl.int64) * scores.bias_j
    at = scores.bias + by_b + by_h + by_i + by_j
    return tl.load(at, mask=(i < M) & (j < scores.columns), other=0.0)


@triton.jit
def natural_scores(products, bias, scores, offset, h, i, j):
    """s of docs/attention.md, not masked"""
    s = scaled(products, scores)
    if bias is not None:
        s += bias.to(tl.float32)
    if scores.slopes is not None:
        s -= tl.load(scores.slopes + h) * tl.abs(i + offset - j).to(tl.float32)
    return s


@triton.jit
def exponents(products, bias, scores, offset, h, i, j, EXACT: tl.constexpr):
    """Scores in the unit of exponents: natural if EXACT, else times log2(e). `bias` is their tile
    of it, or None.

    The latter saves a product an element. Where scores are 100 it costs 1e-5 of a weight, which
    float32 would show and halves do not.
    """
    if scores.plain_scale is not None and not EXACT:
        return products * scores.plain_scale
    else:
        return unit(natural_scores(products, bias, scores, offset, h, i, j), EXACT)


@triton.jit
def unit(x, EXACT: tl.constexpr):
    """A natural exponent in the unit of `exponents`"""
    if EXACT:
        return x
    else:
        return x * LOG2E


@triton.jit
def power(x, EXACT: tl.constexpr):
    """exp of a difference of `exponents`"""
    if EXACT:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp2(x)


@triton.jit
def logarithm(base, total, EXACT: tl.constexpr):
    """log(exp(base) total), for a base in the unit of `exponents`"""
    if EXACT:
        return base + tl.log2(total) * LN2
    else:
        return (base + tl.log2(total)) * LN2
