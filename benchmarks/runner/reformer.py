"""Cost of the Reformer: time of its attention over the length, memory of its layers over the depth.

    python -m benchmarks.runner.reformer
    MALLOC_MMAP_THRESHOLD_=65536 python -m benchmarks.runner.reformer --lengths --layers 2 12 24

Times include hashing, sorting and merging, and are interleaved with causal attention's. The forward
pass is inference. Results of 1,024 tokens are first compared with dense attention.

Memory is the peak of a forward and backward pass beyond weights, with reversible layers and with
plain autograd. The C library keeps free memory in its heap: with its default threshold, several
times as much as is in use. The variable turns that off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.runner import over_causal
from benchmarks.runner.over_causal import Row
from transformer_kernels.bench.cases import Attend
from transformer_kernels.bench.memory import peak_extra_bytes
from transformer_kernels.nn import (
    AttnImplementation,
    ReformerBlock,
    ReversibleStack,
    default_buckets,
    hash_buckets,
    lsh_attention,
    sorted_by_bucket,
)

CHUNK = 64
ROUNDS = (1, 2, 4)
COMPARED = 1024
"""Number of tokens that are compared with dense attention"""


def hashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rounds: int,
    attn_implementation: AttnImplementation = "fused",
) -> Tensor:
    """Attention by hashing, which does not use k; the same hashes at every call."""
    buckets = hash_buckets(
        q,
        rounds=rounds,
        buckets=default_buckets(q.shape[2], CHUNK),
        generator=torch.Generator().manual_seed(0),
    )
    order = sorted_by_bucket(buckets)
    return lsh_attention(q, v, order, chunk=CHUNK, attn_implementation=attn_implementation)


def attends() -> dict[str, Attend]:
    """Attention with each number of rounds, by name."""
    return {f"hashed, rounds = {rounds}": partial(hashed, rounds=rounds) for rounds in ROUNDS}


def check(heads: int, dtype: torch.dtype) -> None:
    """Raises AssertionError if a result differs from dense attention to the same keys."""
    q, k, v, _ = over_causal.projected_inputs(COMPARED, heads, dtype)
    for rounds, attend in zip(ROUNDS, attends().values(), strict=True):
        expected = hashed(q, k, v, rounds=rounds, attn_implementation="eager")
        torch.testing.assert_close(attend(q, k, v), expected, atol=0.02, rtol=0.02)


def measure(length: int, heads: int, dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures the attention at one length.

    Raises:
        AssertionError: a result differs from dense attention.
    """
    check(heads, dtype)
    inputs = over_causal.projected_inputs(length, heads, dtype)
    yield from over_causal.measure(attends(), inputs, seconds)


def peak_mib(layers: int, *, length: int, width: int, reversible: bool) -> float | None:
    """Peak memory of a forward and backward pass of a stack, without gradients of weights, in MiB.

    None if the system cannot measure it.
    """
    stack = ReversibleStack(ReformerBlock(width, 4, chunk=CHUNK) for _ in range(layers))
    stack.requires_grad_(False)
    stack.reversible = reversible
    x = torch.randn(1, length, width, requires_grad=True)

    def prepare() -> Callable[[], object]:
        return lambda: sum(stack(x, x, rounds=2, generator=torch.Generator())).sum().backward()

    size = peak_extra_bytes(prepare)
    return None if size is None else size / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.reformer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    over_causal.add_options(parser, lengths=[1024, 4096, 16_384, 65_536])
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="depths for the memory")
    parser.add_argument("--length", type=int, default=16_384, help="tokens for the memory")
    parser.add_argument("--width", type=int, default=256, help="width for the memory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.lengths:
        print("| T | direction | attention | microseconds a token | ms | over causal | peak MiB |")
        print("|---:|---|---|---:|---:|---:|---:|")
    for length in args.lengths:
        for row in measure(length, args.heads, getattr(torch, args.dtype), args.seconds):
            print(
                f"| {length} | {row.direction} | {row.variant} | {1000 * row.ms / length:.2f} "
                f"| {over_causal.cells(row)}",
                flush=True,
            )
    if args.layers:
        print("| layers | reversible MiB | plain autograd MiB |")
        print("|---:|---:|---:|")
    for layers in args.layers:
        sizes = [
            peak_mib(layers, length=args.length, width=args.width, reversible=reversible)
            for reversible in (True, False)
        ]
        shown = " | ".join("-" if size is None else f"{size:.0f}" for size in sizes)
        print(f"| {layers} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
