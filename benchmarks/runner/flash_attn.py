"""The functions of `integrations.flash_attn` on a CPU; the table of docs/drop-in.md.

    python -m benchmarks.runner.flash_attn

flash_attn itself runs on GPUs only. Each line compares a function with what takes its place without
it: decoding with sdpa of a padded cache, pages with keys that are packed already, and a short call
with `attention`, which shows the time of the adapter. The implementations are interleaved, after
their outputs are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import transformer_kernels as tk
from benchmarks.runner.drop_in import BAND, Row, Work, assert_same, line, timed
from transformer_kernels.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

PAGE = 16


def decoding(
    lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype, seconds: float
) -> Row:
    """Measures one token for each sequence: it is written into the cache, and attends to it.

    Args:
        lengths: positions in use, of each sequence.
        heads: of queries, and of keys and values.
        dtype: of all tensors.
        seconds: time for the measurement.
    """
    B, longest = len(lengths), max(lengths)
    q = torch.randn(B, 1, heads[0], 64, dtype=dtype)
    k, v = (torch.randn(B, 1, heads[1], 64, dtype=dtype) for _ in range(2))
    k_cache, v_cache = (torch.randn(B, longest + 1, heads[1], 64, dtype=dtype) for _ in range(2))
    used = torch.tensor(lengths, dtype=torch.int32)
    visible = (torch.arange(longest + 1) <= used[:, None])[:, None, None]
    entry = torch.arange(B)

    def by_sdpa() -> Tensor:
        k_cache[entry, used], v_cache[entry, used] = k[:, 0], v[:, 0]
        o = scaled_dot_product_attention(
            q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2),
            attn_mask=visible, enable_gqa=heads[0] != heads[1],
        )  # fmt: skip
        return o.transpose(1, 2)

    def by_ours() -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)

    return _row("decode", {"sdpa": by_sdpa, "ours": by_ours}, dtype, seconds)


def paged_prefill(
    lengths: tuple[int, ...], new: int, heads: tuple[int, int], dtype: torch.dtype, seconds: float
) -> Row:
    """Measures `new` tokens, fewer by one for each further sequence, with keys in pages.

    Args:
        lengths: keys of each sequence, its new tokens included; multiples of the page size.
        new: tokens of the first sequence.
        heads: of queries, and of keys and values.
        dtype: of all tensors.
        seconds: time for the measurement.
    """
    queries = [new - n for n in range(len(lengths))]
    q = torch.randn(sum(queries), heads[0], 64, dtype=dtype)
    pages = sum(lengths) // PAGE
    k, v = (torch.randn(pages, PAGE, heads[1], 64, dtype=dtype) for _ in range(2))
    order = torch.randperm(pages)
    table = torch.zeros(len(lengths), max(lengths) // PAGE, dtype=torch.int32)
    for b, part in enumerate(order.split([length // PAGE for length in lengths])):
        table[b, : len(part)] = part
    k_packed, v_packed = (x[order].flatten(0, 1) for x in (k, v))
    sizes = (_ends(queries), _ends(lengths), new, max(lengths))

    def by_packed() -> Tensor:
        return flash_attn_varlen_func(q, k_packed, v_packed, *sizes, causal=True)

    def by_ours() -> Tensor:
        return flash_attn_varlen_func(q, k, v, *sizes, causal=True, block_table=table)

    calls = {"packed": by_packed, "ours": by_ours}
    return _row(f"{new} tokens, keys in pages", calls, dtype, seconds)


def short_call(dtype: torch.dtype, seconds: float) -> Row:
    """Measures 16 tokens of 12 heads."""
    q, k, v = (torch.randn(1, 16, 12, 64, dtype=dtype) for _ in range(3))
    causal = tk.Mask.causal(align="bottom_right")

    def direct() -> Tensor:
        return tk.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=causal).transpose(1, 2)

    def by_ours() -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    return _row("short call", {"attention": direct, "ours": by_ours}, dtype, seconds)


def _ends(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def _row(
    what: str, calls: dict[str, Callable[[], Tensor]], dtype: torch.dtype, seconds: float
) -> Row:
    first, *_ = calls
    expected = calls[first]().float()
    assert_same("ours", calls["ours"]().float(), expected, dtype)

    def prepared(call: Callable[[], Tensor]) -> Callable[[], Work]:
        return lambda: call

    return Row(what, timed({name: prepared(call) for name, call in calls.items()}, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runner.flash_attn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = (2048, 1024, 512, 256)
    for dtype in BAND:
        rows = (
            decoding(lengths, (32, 8), dtype, args.seconds),
            paged_prefill(lengths, 256, (32, 8), dtype, args.seconds),
            paged_prefill(lengths, 16, (32, 8), dtype, args.seconds),
            short_call(dtype, args.seconds),
        )
        for row in rows:
            print(line(str(dtype), row), flush=True)


if __name__ == "__main__":
    main()
