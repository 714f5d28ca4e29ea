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
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels import Mask, attention
from transformer_kernels.bench import Budget, Inputs, Interleaver, prepare_work
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.memory import peak_extra_bytes
from transformer_kernels.nn import SparsePattern, sparse_attention

D = 64
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


@dataclass(frozen=True)
class Row:
    """Times are medians, relative to causal attention."""

    length: int
    direction: str
    pattern: str
    share: float
    ms: float
    ratio: float
    mib: float | None


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


def variants() -> dict[str, tuple[SparsePattern, Attend]]:
    """Each pattern with its attention function, by name."""

    def attend(pattern: SparsePattern) -> Attend:
        return lambda q, k, v: sparse_attention(q, k, v, pattern)

    return {name: (pattern, attend(pattern)) for name, pattern in PATTERNS.items()}


def measure(length: int, heads: int, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures all patterns at one length.

    Raises:
        AssertionError: a result differs from that with a dense mask.
    """
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        """(1, heads, length, D): heads of one projection."""
        return torch.randn(1, length, heads, D, generator=generator).to(dtype).transpose(1, 2)

    inputs = Inputs(normal(), normal(), normal(), normal())
    attends: dict[str, Attend] = {"causal": lambda q, k, v: attention(q, k, v, mask=Mask.causal())}
    shares = {"causal": 1.0}
    for name, (pattern, attend) in variants().items():
        check(inputs, pattern, attend)
        attends[name], shares[name] = attend, shown_share(pattern, heads, length)
    for direction in ("fwd", "fwd+bwd"):
        work = {name: prepare_work(each, inputs, direction) for name, each in attends.items()}
        timings = Interleaver(work).run(Budget(seconds))
        for name, timing in timings.items():
            peak = peak_extra_bytes(work[name])
            yield Row(
                length, direction, name, shares[name], timing.median_ms,
                timing.median_ms / timings["causal"].median_ms,
                None if peak is None else peak / 2**20,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.sparse_transformer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[12_288, 65_536], metavar="T")
    parser.add_argument("--heads", type=int, default=2, help="number of heads, even (default: 2)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each direction")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| T | direction | pattern | share shown | ms | over causal | peak MiB |")
    print("|---:|---|---|---:|---:|---:|---:|")
    for length in args.lengths:
        for row in measure(length, args.heads, getattr(torch, args.dtype), args.seconds):
            peak = "-" if row.mib is None else f"{row.mib:.1f}"
            print(
                f"| {length} | {row.direction} | {row.pattern} | {row.share:.3f} | {row.ms:.1f} "
                f"| {row.ratio:.3f} | {peak} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
