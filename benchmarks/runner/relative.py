"""Cost of relative positions: none, a table or keys by distance, the same scores as a dense bias,
and FlexAttention with the same scores.

    python -m benchmarks.runner.relative
    python -m benchmarks.runner.relative --shapes 1,12,2048,2048,64 --dtype bfloat16 --threads 1
    python -m benchmarks.runner.relative --kind keys --shapes 1,4,512,1024,64

Queries and keys end at the same position; with keys by distance attention is causal, as in
Transformer-XL. The forward pass is inference; forward + backward computes the gradients of the
table or keys too. Results are compared with the dense bias first, then timed interleaved.
FlexAttention is compiled; on a CPU it has no backward pass. With torch 2.13 and AVX2 its results at
toy sizes depend on memory that it has not written: rows may be zero.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.runner.dense_skew import causal_bias
from transformer_kernels import Mask, attention, relative_bias, relative_keys
from transformer_kernels.bench import Budget, Direction, Inputs, Interleaver, prepare_work
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.memory import peak_extra_bytes

Kind = Literal["table", "keys"]
ENTRIES = 257
"""Entries of the tables: T5's distances, -128 to 128."""
FLEX = "FlexAttention"
TOLERANCE = 0.02


class Shape(NamedTuple):
    B: int
    H: int
    M: int
    N: int
    D: int


@dataclass(frozen=True)
class Variant:
    attend: Attend
    learned: tuple[Tensor, ...] = ()
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """Times are medians, relative to those without relative positions."""

    shape: Shape
    direction: Direction
    variant: str
    ms: float
    ratio: float
    mib: float | None


def variants(shape: Shape, dtype: torch.dtype, kind: Kind) -> tuple[Inputs, dict[str, Variant]]:
    """Returns inputs, and the variants by name."""
    B, H, M, N, D = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    q, do = normal(B, H, M, D), normal(B, H, M, D)
    inputs = Inputs(q, normal(B, H, N, D), normal(B, H, N, D), do)
    if kind == "keys":
        return inputs, _keys(normal(H, N, D).requires_grad_(), shape)
    return inputs, _table(normal(H, ENTRIES).float().requires_grad_(), shape, dtype)


def _table(table: Tensor, shape: Shape, dtype: torch.dtype) -> dict[str, Variant]:
    relative = relative_bias(table, lowest=-(ENTRIES // 2), align="bottom_right")
    bias = relative.dense(shape.M, shape.N).detach().to(dtype).requires_grad_()
    flat, shift = table.detach().to(dtype), shape.N - shape.M + ENTRIES // 2

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + flat[h, (i - j + shift).clamp(0, ENTRIES - 1)]

    compiled = _compiled_flex()
    return {
        "none": Variant(attention),
        "relative": Variant(lambda q, k, v: attention(q, k, v, relative=relative), (table,)),
        "dense bias": Variant(lambda q, k, v: attention(q, k, v, bias=bias), (bias,)),
        FLEX: Variant(lambda q, k, v: compiled(q, k, v, score_mod=add), directions=("fwd",)),
    }


def _keys(keys: Tensor, shape: Shape) -> dict[str, Variant]:
    M, N, D = shape.M, shape.N, shape.D
    mask = Mask.causal(align="bottom_right")
    scale: float = D**-0.5

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + N - M

    blocks = create_block_mask(visible, None, None, M, N, device="cpu")
    compiled = _compiled_flex()

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        products = q @ keys.detach().mT * scale

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + products[b, h, i, (i + N - M - j).clamp(0, N - 1)]

        o: Tensor = compiled(q, k, v, score_mod=add, block_mask=blocks)
        return o

    relative = relative_keys(keys, lowest=0, align="bottom_right")
    return {
        "none": Variant(lambda q, k, v: attention(q, k, v, mask=mask)),
        "relative": Variant(
            lambda q, k, v: attention(q, k, v, mask=mask, relative=relative), (keys,)
        ),
        "dense bias": Variant(
            lambda q, k, v: attention(q, k, v, mask=mask, bias=causal_bias(q, relative, scale)),
            (keys,),
        ),
        FLEX: Variant(flex, directions=("fwd",)),
    }


def _compiled_flex() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def measure(shape: Shape, dtype: torch.dtype, kind: Kind, seconds: float) -> Iterator[Row]:
    """Measures all variants of one shape. FlexAttention is left out, with a line that says so, if
    its result is wrong.

    Raises:
        AssertionError: our result differs from that with the dense bias.
    """
    inputs, every = variants(shape, dtype, kind)
    with torch.no_grad():
        expected = every["dense bias"].attend(*inputs[:3])
        o, of_flex = (every[name].attend(*inputs[:3]) for name in ("relative", FLEX))
    torch.testing.assert_close(o, expected, atol=TOLERANCE, rtol=TOLERANCE)
    if not torch.allclose(of_flex, expected, atol=TOLERANCE, rtol=TOLERANCE):
        worst = float((of_flex - expected).abs().max())
        print(f"FlexAttention is left out: its result is off by {worst:.2g}", file=sys.stderr)
        del every[FLEX]
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
    parser.add_argument("--kind", default="table", choices=["table", "keys"])
    parser.add_argument(
        "--shapes", nargs="+", default=["1,8,512,512,64", "1,8,2048,2048,64"], metavar="B,H,M,N,D"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each direction")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| B, H, M, N, D | direction | positions | ms | over none | peak MiB |")
    print("|---|---|---|---:|---:|---:|")
    for text in args.shapes:
        shape = Shape(*map(int, text.split(",")))
        for row in measure(shape, getattr(torch, args.dtype), args.kind, args.seconds):
            peak = "-" if row.mib is None else f"{row.mib:.1f}"
            print(
                f"| {text} | {row.direction} | {row.variant} | {row.ms:.2f} | {row.ratio:.2f} "
                f"| {peak} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
