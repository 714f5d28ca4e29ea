"""Jagged nested tensors under `enable`, and block masks of FlexAttention; the tables of drop-in.md.

    python -m benchmarks.runner.drop_in

The implementations are interleaved, after their outputs are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

import transformer_kernels as tk
from transformer_kernels.bench import Budget, Interleaver

BAND = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest difference between two implementations, relative to the largest value."""
DOCUMENT = 300
Work = Callable[[], Tensor]


class Row(NamedTuple):
    """One measurement."""

    what: str
    milliseconds: dict[str, float]
    """by implementation, ours last"""


def jagged(longest: int, heads: int, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures self-attention of 8 sequences, lengths spread evenly from 1 to `longest`.

    Raises:
        AssertionError: two implementations differ.
    """
    lengths = torch.linspace(1, longest, 8).round().int()
    rows = [torch.randn(n, heads, 64, dtype=dtype) for n in lengths.tolist()]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged).requires_grad_()
    padded = pad_sequence(rows, batch_first=True).requires_grad_()
    visible = torch.arange(longest) < lengths[:, None]

    def packed(x: Tensor) -> Tensor:
        q = x.transpose(1, 2)
        return scaled_dot_product_attention(q, q, q).transpose(1, 2).values()

    def masked(x: Tensor) -> Tensor:
        q, mask = x.transpose(1, 2), visible[:, None, None]
        return scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2)[visible]

    calls = {"jagged": (packed, nested), "padded": (masked, padded), "ours": (packed, nested)}
    do = torch.randn(sum(map(len, rows)), heads, 64, dtype=dtype)

    def prepare(name: str, backward: bool) -> Work:
        (tk.enable if name == "ours" else tk.disable)()
        call, x = calls[name]
        return lambda: torch.autograd.grad(call(x), x, do)[0] if backward else call(x)

    try:
        expected = prepare("jagged", False)().float()
        for name in ("padded", "ours"):
            assert_same(name, prepare(name, False)().float(), expected, dtype)
        for backward in (False, True):
            work = {name: partial(prepare, name, backward) for name in calls}
            yield Row("forward + backward" if backward else "forward", timed(work, seconds))
    finally:
        tk.disable()


def block_mask(length: int, heads: int, dtype: torch.dtype, seconds: float) -> Row:
    """Measures the forward pass with causal documents of 300 tokens.

    Raises:
        AssertionError: the implementations differ.
    """
    document = torch.arange(length) // DOCUMENT

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i)

    blocks = create_block_mask(mask_mod, None, None, length, length, "cpu")
    mask, compiled = tk.Mask.from_block_mask(blocks), torch.compile(flex_attention)
    q, k, v = (torch.randn(1, heads, length, 64, dtype=dtype) for _ in range(3))

    def by_flex() -> Tensor:
        o: Tensor = compiled(q, k, v, block_mask=blocks)
        return o

    def by_ours() -> Tensor:
        return tk.attention(q, k, v, mask=mask)

    assert_same("ours", by_ours().float(), by_flex().float(), dtype)
    return Row("forward", timed({"flex": lambda: by_flex, "ours": lambda: by_ours}, seconds))


def assert_same(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError if the largest difference exceeds the band."""
    off = ((got - expected).abs().max() / expected.abs().max()).item()
    assert off <= BAND[dtype], f"{name}, {dtype}: {off:.1e} off"


def timed(work: Mapping[str, Callable[[], Work]], seconds: float) -> dict[str, float]:
    """Returns the median milliseconds of each implementation."""
    timings = Interleaver(work).run(Budget(seconds))
    return {name: timing.median_ms for name, timing in timings.items()}


def line(title: str, row: Row) -> str:
    """Formats a line: our time and its ratio to each other."""
    ours = row.milliseconds["ours"]
    others = [f"{ms / ours:.2f}x {name}" for name, ms in row.milliseconds.items() if name != "ours"]
    return f"{title}, {row.what}: {ours:.3g} ms, {', '.join(others)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runner.drop_in")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in BAND:
        for row in jagged(512, 12, dtype, args.seconds):
            print(line(f"jagged, {dtype}", row), flush=True)
        print(line(f"block mask, {dtype}", block_mask(2048, 8, dtype, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
