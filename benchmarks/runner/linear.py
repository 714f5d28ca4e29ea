"""Linear attention over the length: against causal attention, plain torch and other packages.

    python -m benchmarks.runner.linear
    python -m benchmarks.runner.linear --lengths 4096 --picture linear.svg

All variants compute phi = elu + 1, causal and normalized, and run in interleaved rounds. Results of
512 tokens are first compared with float64. Packages that are not installed are left out:
pytorch-fast-transformers has a compiled CPU kernel, fla-core a reference in torch.

The last table has the share of the product rate: the products of the kernel, without those above
the diagonal, per second, over those of torch.matmul of 2,048 x 2,048 matrices in the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.runner import over_causal
from benchmarks.runner.over_causal import D, Row
from transformer_kernels import linear_attention
from transformer_kernels.bench import Budget, Interleaver, prepare_work
from transformer_kernels.bench.cases import Attend, Direction
from transformer_kernels.bench.pictures import TITLES, new_figure, save
from transformer_kernels.linear.types import CHUNK

COMPARED = 512
"""Number of tokens that are compared with float64"""
LONGEST_CUMULATIVE = 2048
"""Longest sequence for the cumulative sum, whose states of all tokens take D x D numbers each"""
LONGEST_CAUSAL = 16_384
"""From there on causal attention runs in one round"""
EPS = 1e-6
MATRIX = 2048
PRODUCTS = {"fwd": (2, 2), "fwd+bwd": (8, 7)}
"""Products per chunk: triangles of CHUNK x CHUNK weights, and products with a state"""


def phi(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


def cumulative_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The states of all tokens at once, by torch.cumsum."""
    q, k = phi(q), phi(k)
    states = (k[..., :, None] * v[..., None, :]).cumsum(2)
    o = (q[..., None, :] @ states).squeeze(-2)
    return o / ((q * k.cumsum(2)).sum(-1, keepdim=True) + EPS)


def fast_transformers() -> Attend:
    """The kernel of pytorch-fast-transformers with the denominator of its module, in torch."""
    from fast_transformers.causal_product import causal_dot_product

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = phi(q), phi(k)
        o: Tensor = causal_dot_product(q, k, v)
        return o / ((q * k.cumsum(2)).sum(-1, keepdim=True) + EPS)

    return attend


def fla() -> Attend:
    """The reference of fla-core in torch; its kernels need a GPU."""
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (phi(q), phi(k), v))
        o: Tensor = naive_chunk_linear_attn(q, k, v, scale=1.0, normalize=True)
        return o.transpose(1, 2)

    return attend


PEERS: dict[str, Callable[[], Attend]] = {
    "pytorch-fast-transformers": fast_transformers,
    "fla-core, torch": fla,
}


def attends(length: int) -> dict[str, Attend]:
    """The variants that can run at a length, by name."""
    found: dict[str, Attend] = {
        "linear": linear_attention,
        "chunks in torch": partial(linear_attention, backend="reference"),
    }
    if length <= LONGEST_CUMULATIVE:
        found["cumulative sum in torch"] = cumulative_sum
    for name, make in PEERS.items():
        try:
            found[name] = make()
        except ImportError:
            print(f"left out: {name} is not installed", flush=True)
    return found


def check(heads: int, dtype: torch.dtype) -> None:
    """Raises AssertionError if a result differs from linear attention in float64."""
    q, k, v, _ = over_causal.projected_inputs(COMPARED, heads, dtype)
    exact = linear_attention(q.double(), k.double(), v.double(), backend="reference")
    for attend in attends(COMPARED).values():
        torch.testing.assert_close(attend(q, k, v).double(), exact, atol=0.02, rtol=0.02)


def measure(length: int, heads: int, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures all variants at one length.

    Raises:
        AssertionError: a result is wrong.
    """
    check(heads, dtype)
    inputs = over_causal.projected_inputs(length, heads, dtype)
    rounds = 1 if length > LONGEST_CAUSAL else None
    yield from over_causal.measure(attends(length), inputs, seconds, causal_rounds=rounds)


def product_share(length: int, heads: int, direction: Direction, seconds: float) -> float:
    """Share of the rate of float32 products that torch.matmul reaches in the same rounds."""
    inputs = over_causal.projected_inputs(length, heads, torch.float32)
    a = torch.randn(MATRIX, MATRIX)
    work = {
        "linear": prepare_work(linear_attention, inputs, direction),
        "matmul": lambda: lambda: a @ a,
    }
    ms = {name: timing.median_ms for name, timing in Interleaver(work).run(Budget(seconds)).items()}
    triangles, states = PRODUCTS[direction]
    chunk = (0.75 * triangles * CHUNK + states * D) * CHUNK * D
    products = heads * length / CHUNK * chunk
    return products / ms["linear"] / (MATRIX**3 / ms["matmul"])


def draw(rows: list[Row], path: Path) -> None:
    """Draws time over the length, for both directions."""
    figure, panels = new_figure(2)
    lengths = sorted({row.length for row in rows})
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    for axes, direction in zip(panels, directions, strict=True):
        for name in dict.fromkeys(row.variant for row in rows):
            mine = [r for r in rows if r.variant == name and r.direction == direction]
            axes.plot([r.length for r in mine], [r.ms for r in mine], marker="o", label=name)
        axes.set(title=TITLES[direction], ylabel="milliseconds", xlabel="sequence length")
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
        axes.set_xticks(lengths, [str(length) for length in lengths])
    panels[0].legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lengths = [512, 1024, 2048, 4096, 16_384, 65_536]
    over_causal.add_options(parser, lengths=lengths, heads=8)
    parser.add_argument("--picture", type=Path, help="image of time over the length")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print("| T | direction | attention | ms | over causal | peak MiB |")
    print("|---:|---|---|---:|---:|---:|")
    for length in args.lengths:
        for row in measure(length, args.heads, getattr(torch, args.dtype), args.seconds):
            rows.append(row)
            print(
                f"| {length} | {row.direction} | {row.variant} | {over_causal.cells(row)}",
                flush=True,
            )
    if args.picture:
        draw(rows, args.picture)
    if args.dtype == "float32":
        print("| T | share of the product rate: forward | forward + backward |")
        print("|---:|---:|---:|")
        for length in args.lengths:
            share = [
                f"{product_share(length, args.heads, direction, args.seconds / 3):.2f}"
                for direction in ("fwd", "fwd+bwd")
            ]
            print(f"| {length} | {share[0]} | {share[1]} |", flush=True)


if __name__ == "__main__":
    main()
