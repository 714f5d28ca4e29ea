"""Attention over a million tokens, divided over the processes that torchrun starts.

    .venv/bin/python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runner.long_sequence

Forward passes of sparse masks: time of a run after a warm-up, and the largest peak memory of a
process. Some rows are compared with float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from transformer_kernels import Mask
from transformer_kernels.bench.memory import peak_extra_bytes
from transformer_kernels.distributed import SequenceLayout, ring_attention, unshard_sequence
from transformer_kernels.masks import block_patterns
from transformer_kernels.training.distributed import end_process_group

_D = 64
_ROWS = 8
"""Rows that are compared with float64."""
_BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error, relative to the largest value."""


@dataclass(frozen=True)
class Pattern:
    """A causal mask."""

    name: str
    mask: Mask
    layout: SequenceLayout
    pairs: int
    """Visible pairs."""
    visible: Callable[[int, Tensor], Tensor]
    """(row, columns) -> True where the row sees the column."""


def window_of(tokens: int, size: int) -> Pattern:
    """A causal sliding window."""
    return Pattern(
        f"window of {size}",
        Mask.window(size - 1, 0),
        "contiguous",
        tokens * size - size * (size - 1) // 2,
        lambda row, j: (j <= row) & (j > row - size),
    )


def strided(tokens: int, block: int, stride: int) -> Pattern:
    """The strided pattern of the Sparse Transformer, in blocks."""
    blocks = tokens // block
    layout = block_patterns.strided(blocks, blocks, stride)
    below = int(layout.sum()) - blocks

    def visible(row: int, j: Tensor) -> Tensor:
        distance = row // block - j // block
        return (j <= row) & ((distance < stride) | (distance % stride == 0))

    return Pattern(
        f"strided by {stride} blocks of {block}",
        Mask.causal() & Mask.block_sparse(layout, block),
        "zigzag",
        below * block**2 + blocks * block * (block + 1) // 2,
        visible,
    )


def largest_error(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> float:
    """Error of some rows against float64, relative to the largest value. A collective."""
    q, k, v, o = (unshard_sequence(x, dim=2, layout=pattern.layout) for x in (q, k, v, o))
    tokens = q.shape[2]
    errors = []
    for row in torch.linspace(0, tokens - 1, _ROWS).long().tolist():
        seen = pattern.visible(row, torch.arange(tokens))
        s = q[:, :, row, None].double() @ k[:, :, seen].double().mT * q.shape[-1] ** -0.5
        exact = (s.softmax(-1) @ v[:, :, seen].double())[:, :, 0]
        errors.append(float((o[:, :, row] - exact).abs().max() / exact.abs().max()))
    return max(errors)


def measure(pattern: Pattern, tokens: int, heads: int, dtype: torch.dtype) -> None:
    """Prints a row of the table."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = tokens // dist.get_world_size()
    q, k, v = (torch.randn(1, heads, own, _D, generator=generator).to(dtype) for _ in range(3))

    latest: list[tuple[float, Tensor]] = []

    def attend() -> None:
        latest.clear()
        dist.barrier()
        start = time.perf_counter()
        o = ring_attention(q, k, v, mask=pattern.mask, layout=pattern.layout)
        dist.barrier()
        latest.append((time.perf_counter() - start, o))

    extra = peak_extra_bytes(lambda: attend) or 0  # of the second run of two
    seconds, o = latest.pop()
    error = largest_error(pattern, q, k, v, o)
    if error > _BOUND[dtype]:
        raise AssertionError(f"{pattern.name}: the error is {error:.1e}")
    memory: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, extra)
    if dist.get_rank() == 0:
        shard = 3 * q.numel() * q.element_size() / 2**20
        mib = max(x or 0 for x in memory) / 2**20
        flops = 4 * pattern.pairs * heads * _D
        print(
            f"{pattern.name:34}{pattern.pairs / tokens**2:9.3%}{seconds:8.2f} s"
            f"{flops / seconds / 1e9:9.0f} GFLOP/s{shard:9.0f}{mib:9.0f} MiB{error:9.1e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = options.tokens
    if dist.get_rank() == 0:
        print(
            f"{tokens} tokens, {options.heads} heads of {_D}, {options.dtype}, "
            f"{dist.get_world_size()} processes of one thread, forward\n"
            f"{'':34}{'visible':>9}{'time':>8}{'':18}{'q, k, v':>9}{'further':>9}{'':4}"
            f"{'error':>9}"
        )
    for pattern in (window_of(tokens, tokens // 256), strided(tokens, tokens // 1024, 16)):
        measure(pattern, tokens, options.heads, getattr(torch, options.dtype))
    end_process_group()


if __name__ == "__main__":
    main()
