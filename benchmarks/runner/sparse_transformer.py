"""Cost of the Sparse Transformer's patterns over causal attention, beside the share they show.

    python -m benchmarks.runner.sparse_transformer
    python -m benchmarks.runner.sparse_transformer --lengths 12288 --heads 4 --dtype bfloat16

The share is that of the pairs visible under the causal mask. Times include views, gathers and
merges. The forward pass is inference. The last queries are compared with attention under a dense
mask first; then all patterns and causal attention are timed interleaved.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.runner import over_causal
from benchmarks.runner.over_causal import Row
from transformer_kernels import Mask, attention
from transformer_kernels.bench import Inputs
from transformer_kernels.bench.cases import Attend
from transformer_kernels.nn import SparsePattern, sparse_attention

STRIDE = 128
PATTERNS = {
    "local": SparsePattern(kind="local", stride=STRIDE),
    "strided": SparsePattern(kind="strided", stride=STRIDE),
    "strided, split heads": SparsePattern(kind="strided", stride=STRIDE, combination="split"),
    "fixed, c = 32": SparsePattern(kind="fixed", stride=STRIDE, summaries=32),
    "fixed, c = 8": SparsePattern(kind="fixed", stride=STRIDE, summaries=8),
    "fixed, c = 8, 2 subblocks": SparsePattern(
        kind="fixed", stride=STRIDE, summaries=8, subblocks=2
    ),
}
COMPARED = 256
"""Number of queries that are compared with a dense mask"""


def shown_share(pattern: SparsePattern, heads: int, length: int) -> float:
    """Share of the causal pairs that a pattern shows, on average over the heads."""
    shown = 0
    for start in range(0, length, COMPARED):
        end = min(start + COMPARED, length)
        shown += int(pattern.visible(heads, end, start=start).sum())
    return shown / (heads * length * (length + 1) / 2)


def check(inputs: Inputs, pattern: SparsePattern, attend: Attend) -> None:
    """Raises AssertionError if the last queries differ from attention with a dense mask."""
    q, k, v, _ = inputs
    heads, length = q.shape[1:3]
    start = max(0, length - COMPARED)
    mask = Mask.dense(pattern.visible(heads, length, start=start))
    expected = attention(q[:, :, start:], k, v, mask=mask)
    torch.testing.assert_close(attend(q, k, v)[:, :, start:], expected, atol=0.01, rtol=0.02)


def attends() -> dict[str, Attend]:
    """The attention function of each pattern, by name."""
    return {name: partial(sparse_attention, pattern=each) for name, each in PATTERNS.items()}


def measure(
    length: int, heads: int, dtype: torch.dtype, seconds: float
) -> Iterator[tuple[Row, float]]:
    """Measures all patterns at one length; yields each row with the share of its pattern.

    Raises:
        AssertionError: a result differs from that with a dense mask.
    """
    inputs = over_causal.projected_inputs(length, heads, dtype)
    for name, attend in attends().items():
        check(inputs, PATTERNS[name], attend)
    shares = {name: shown_share(each, heads, length) for name, each in PATTERNS.items()}
    for row in over_causal.measure(attends(), inputs, seconds):
        yield row, shares.get(row.variant, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.sparse_transformer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    over_causal.add_options(parser, lengths=[12_288, 65_536])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| T | direction | pattern | share shown | ms | over causal | peak MiB |")
    print("|---:|---|---|---:|---:|---:|---:|")
    for length in args.lengths:
        for row, share in measure(length, args.heads, getattr(torch, args.dtype), args.seconds):
            print(
                f"| {length} | {row.direction} | {row.variant} | {share:.3f} "
                f"| {over_causal.cells(row)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
