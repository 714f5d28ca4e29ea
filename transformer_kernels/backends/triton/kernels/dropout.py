"""Dropout mask: Philox4x32-7 on 16-bit halves, docs/attention.md section 7."""

import triton
import triton.language as tl

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)
ROUNDS = tl.constexpr(7)


@triton.jit
def philox(seed, x0, x1, x2, x3):
    """Four 32-bit words from a counter of four words and a 64-bit seed"""
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        a, b = tl.cast(MULTIPLIER_0, tl.uint32), tl.cast(MULTIPLIER_1, tl.uint32)
        y0, y2 = tl.umulhi(b, x2) ^ x1 ^ key0, tl.umulhi(a, x0) ^ x3 ^ key1
        x1, x3 = b * x2, a * x0
        x0, x2 = y0, y2
        key0 += tl.cast(WEYL_0, tl.uint32)
        key1 += tl.cast(WEYL_1, tl.uint32)
    return x0, x1, x2, x3


@triton.jit
def halves(word, threshold):
    """(M, C, 2) int8: 1 where the lower and the upper half of each word is at least `threshold`"""
    low, high = (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)
    return tl.join((low >= threshold).to(tl.int8), (high >= threshold).to(tl.int8))


@triton.jit
def keep_mask(dropout, b, h, i0, j0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Dropout mask of the tile at (i0, j0): bool (BLOCK_M, BLOCK_N), True = kept.

    j0 must be a multiple of BLOCK_N. 64 keys share 8 counters of 4 words of 2 halves: key
    64 n + 16 word + 8 half + c uses counter 8 n + c. A block of 32 keys uses two words of each of
    its 8 counters, a block of 16 keys one.
    """
    seed = tl.load(dropout.seed)
    COUNTERS: tl.constexpr = max(BLOCK_N // 8, 8)
    zero = tl.zeros([BLOCK_M, COUNTERS], tl.uint32)
    counter = (j0 // 64 * 8 + tl.arange(0, COUNTERS)).to(tl.uint32)
    row = (i0 + tl.arange(0, BLOCK_M)).to(tl.uint32)
    w0, w1, w2, w3 = philox(
        seed,
        zero + counter[None, :],
        zero + row[:, None],
        zero + tl.cast(h, tl.uint32),
        zero + tl.cast(b, tl.uint32),
    )
    threshold = dropout.threshold
    if BLOCK_N >= 64:
        # (M, counter, half, word): tl.join appends the new dimension.
        even = tl.join(halves(w0, threshold), halves(w2, threshold))
        odd = tl.join(halves(w1, threshold), halves(w3, threshold))
        bits = tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_N // 64, 8, 2, 2, 2])
        # (M, n, c, half, word >> 1, word & 1) -> (M, n, word >> 1, word & 1, half, c)
        bits = tl.permute(bits, [0, 1, 4, 5, 3, 2])
    elif BLOCK_N == 32:
        second = (j0 // 32) % 2 == 1
        even, odd = tl.where(second, w2, w0), tl.where(second, w3, w1)
        bits = tl.join(halves(even, threshold), halves(odd, threshold))
        bits = tl.permute(bits, [0, 3, 2, 1])
    else:
        tl.static_assert(BLOCK_N == 16, "a block of keys is 16, 32 or a multiple of 64")
        word = (j0 // 16) % 4
        lower, upper = tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)
        bits = tl.permute(halves(tl.where(word < 2, lower, upper), threshold), [0, 2, 1])
    return tl.reshape(bits, [BLOCK_M, BLOCK_N]) != 0
