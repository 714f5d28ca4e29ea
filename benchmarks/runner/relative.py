"""Cost of a relative bias: no bias, a table by distance, the same bias as a dense tensor, and
FlexAttention with the same table.

    python -m benchmarks.runner.relative
    python -m benchmarks.runner.relative --shapes 1,12,2048,64 --dtype bfloat16 --threads 1

The forward pass is inference; forward + backward computes the gradient of the table too. Results
are compared with the dense bias first, then timed interleaved. FlexAttention is compiled; on a CPU
it has no backward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from transformer_kernels import attention, relative_bias
from transformer_kernels.bench import Budget, Direction, Inputs, Interleaver, prepare_work
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.memory import peak_extra_bytes

ENTRIES = 257
"""Entries of the tables: T5's distances, -128 to 128."""


@dataclass(frozen=True)
class Variant:
    attend: Attend
    learned: tuple[Tensor, ...]
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """Times are medians, relative to those without a bias."""

    shape: tuple[int, ...]
    direction: Direction
    variant: str
    ms: float
    ratio: float
    mib: float | None


def variants(
    B: int, H: int, S: int, D: int, dtype: torch.dtype
) -> tuple[Inputs, dict[str, Variant]]:
    """Returns inputs, and the variants by name."""
    generator = torch.Generator().manual_seed(0)
    inputs = Inputs(*(torch.randn(B, H, S, D, generator=generator).to(dtype) for _ in range(4)))
    table = torch.randn(H, ENTRIES, generator=generator, requires_grad=True)
    bias = relative_bias(table, lowest=-(ENTRIES // 2)).dense(S, S).detach().to(dtype)
    bias.requires_grad_()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, relative=relative_bias(table, lowest=-(ENTRIES // 2)))

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = table.detach().to(dtype)

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + flat[h, (i - j + ENTRIES // 2).clamp(0, ENTRIES - 1)]

        return compiled(q, k, v, score_mod=add)

    return inputs, {
        "none": Variant(attention, ()),
        "relative": Variant(by_distance, (table,)),
        "dense bias": Variant(lambda q, k, v: attention(q, k, v, bias=bias), (bias,)),
        "FlexAttention": Variant(flex, (), ("fwd",)),
    }


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures all variants of one shape (B, H, S, D).

    Raises:
        AssertionError: a result differs from that with the dense bias.
    """
    inputs, every = variants(*shape, dtype)
    with torch.no_grad():
        expected = every["dense bias"].attend(*inputs[:3])
        for name in ("relative", "FlexAttention"):
            o = every[name].attend(*inputs[:3])
            torch.testing.assert_close(o, expected, atol=0.02, rtol=0.02)
    for direction in ("fwd", "fwd+bwd"):
        work = {
            name: prepare_work(one.attend, inputs, direction, one.learned)
            for name, one in every.items()
            if direction in one.directions
        }
        timings = Interleaver(work).run(Budget(seconds))
        for name, timing in timings.items():
            peak = peak_extra_bytes(work[name])
            yield Row(
                shape, direction, name, timing.median_ms,
                timing.median_ms / timings["none"].median_ms,
                None if peak is None else peak / 2**20,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.relative",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["1,8,512,64", "1,8,2048,64"], metavar="B,H,S,D"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each direction")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| B, H, S, D | direction | bias | ms | over none | peak MiB |")
    print("|---|---|---|---:|---:|---:|")
    for text in args.shapes:
        B, H, S, D = map(int, text.split(","))
        for row in measure((B, H, S, D), getattr(torch, args.dtype), args.seconds):
            peak = "-" if row.mib is None else f"{row.mib:.1f}"
            print(
                f"| {text} | {row.direction} | {row.variant} | {row.ms:.2f} | {row.ratio:.2f} "
                f"| {peak} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
