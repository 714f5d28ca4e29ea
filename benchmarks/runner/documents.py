"""Packed documents of skewed lengths over gloo processes, against one process with all of them.

    .venv/bin/python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runner.documents

Causal: every document divided, and the packed row in zigzag. The baseline has a thread for each of
the processes, which have one. Balance: visible pairs, largest to mean. Arguments: lengths.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from transformer_kernels import Mask, attention_varlen
from transformer_kernels.bench.provenance import device_slug
from transformer_kernels.bench.tolerance import rounding_band
from transformer_kernels.distributed import (
    ring_attention,
    ring_attention_varlen,
    shard_documents,
    shard_sequence,
)
from transformer_kernels.problem.varlen import one_entry
from transformer_kernels.training.distributed import end_process_group

H, D, ROUNDS, BASELINE = 8, 64, 7, "one process"
LENGTHS = (8192, 2048, 2048, *[256] * 8, *[64] * 16, *[32] * 32)
CAUSAL = Mask.causal()


class Variant(NamedTuple):
    """A way to run the call, on the tokens that `shard` gives this process."""

    shard: Callable[[Tensor], Tensor]
    attend: Callable[..., Tensor]
    divided: bool = True

    def results(self, inputs: list[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields o, then the gradients."""
        o = self.attend(*inputs[:3])
        yield [o.detach()]
        yield torch.autograd.grad(o, inputs[:3], inputs[3])


def variants_of(cu_seqlens: Tensor, ids: Tensor) -> dict[str, Variant]:
    mask = Mask.segments(shard_sequence(ids, dim=0)[None]) & CAUSAL

    def row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(*map(one_entry, (q, k, v)), mask=mask)[0].transpose(0, 1)

    whole = partial(attention_varlen, cu_seqlens_q=cu_seqlens, mask=CAUSAL)
    documents = partial(ring_attention_varlen, cu_seqlens=cu_seqlens, mask=CAUSAL)
    return {
        BASELINE: Variant(lambda x: x, whole, divided=False),
        "ring_attention_varlen": Variant(
            partial(shard_documents, cu_seqlens=cu_seqlens), documents
        ),
        "ring_attention, zigzag row": Variant(partial(shard_sequence, dim=0), row),
    }


def timed(variant: Variant, inputs: list[Tensor]) -> list[float]:
    """Returns seconds to the end of the forward and of the backward pass of the last process."""
    runs = variant.divided or dist.get_rank() == 0
    torch.set_num_threads(1 if variant.divided else dist.get_world_size())
    dist.barrier()
    start, times = time.perf_counter(), []
    for _ in variant.results(inputs) if runs else range(2):
        dist.barrier()
        times.append(time.perf_counter() - start)
    return times


def report(name: str, seconds: Tensor, baseline: Tensor, pairs: Tensor) -> None:
    """Prints medians of (rounds, passes), ratios, and the balance of the visible pairs."""
    most, total = pairs.sum(), pairs.sum()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    ms, ratios = torch.stack((1e3 * seconds, baseline / seconds)).median(1).values
    text = f"{name:28} forward {ms[0]:6.0f} ms {ratios[0]:.2f}x   both {ms[1]:6.0f} ms"
    if dist.get_rank() == 0:
        print(f"{text} {ratios[1]:.2f}x   balance {most * dist.get_world_size() / total:.3f}")


def main() -> None:
    dist.init_process_group("gloo")
    lengths = list(map(int, sys.argv[1:])) or LENGTHS
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    visible = torch.arange(1, len(ids) + 1) - cu_seqlens[ids]  # keys of each token
    whole = torch.randn(4, len(ids), H, D, generator=torch.Generator().manual_seed(0)).unbind()
    variants = variants_of(cu_seqlens, ids)
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    inputs, expected = {}, list[Tensor]()
    for name, one in variants.items():
        inputs[name] = [one.shard(x).detach().requires_grad_(x is not whole[3]) for x in whole]
        got = [x for results in one.results(inputs[name]) for x in results]
        expected = expected or got
        for x, exact in zip(got, map(one.shard, expected), strict=True):
            bound = 4 * rounding_band(exact, exact.dtype, lse=10.0)
            torch.testing.assert_close(x, exact, rtol=0.0, atol=bound)
    for n in range(ROUNDS):
        for name in [*variants, *variants][n % 3 :][:3]:
            times[name].append(timed(variants[name], inputs[name]))
    if dist.get_rank() == 0:
        print(f"{device_slug()}, {len(ids)} tokens, {len(lengths)} documents, H = {H}, D = {D}")
    for name, one in variants.items():
        report(name, torch.tensor(times[name]), torch.tensor(times[BASELINE]), one.shard(visible))
    end_process_group()


if __name__ == "__main__":
    main()
