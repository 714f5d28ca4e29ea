"""Context parallelism on gloo processes of one thread, against one process with all tokens.

The baseline has as many threads as there are processes, while the others wait. Each result is first
compared with the baseline's. All processes time to the end of the last one, in the same rounds.

- `sequence`: ring and all-to-all attention, and the times that the performance model of
  benchmarks/scale predicts from rates measured in the same rounds: kernels on calls of a shard's
  size, by as many processes at once as there are processors; exchanges of a shard's keys between
  two processes. `gbytes_s` counts the bytes that the busiest rank sends, by the same model.
- `documents`: packed documents of skewed lengths, each divided, or the packed row in zigzag.
  `visible` is that of the rank with most pairs, times the number of ranks: over that of the
  baseline it is the imbalance.
- `million tokens`: forward passes of sparse masks over the processes. Some rows are compared with
  float64. `peak_mib` is the largest one of a process, here and everywhere in this suite.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.runner.checks import Sizes, causal_sizes
from benchmarks.runner.ranks import Rank, on_ranks
from benchmarks.runner.run import Comparison
from benchmarks.scale.prediction import BACKWARD_FLOPS, FORWARD_FLOPS, Call, Machine, predict
from transformer_kernels import Mask, attention, attention_varlen
from transformer_kernels.backends.base import Outputs
from transformer_kernels.bench import Budget, Case, Direction, Row, Timing
from transformer_kernels.bench.tolerance import rounding_band
from transformer_kernels.bench.workload import Prepare
from transformer_kernels.dispatch import partial as partial_results
from transformer_kernels.distributed import (
    SequenceLayout,
    all_to_all_attention,
    ring_attention,
    ring_attention_varlen,
    shard_documents,
    shard_sequence,
    unshard_sequence,
)
from transformer_kernels.distributed.peers import Peers
from transformer_kernels.masks import block_patterns
from transformer_kernels.problem.varlen import one_entry

H, D = 8, 64
LENGTHS = (8192, 2048, 2048, *[256] * 8, *[64] * 16, *[32] * 32)
CAUSAL = Mask.causal()
PROCESSORS = len(os.sched_getaffinity(0))
BASELINE = "one process"
BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")


def comparisons() -> Iterator[Comparison]:
    for size in (2, 4):
        for S in (8 << 10, 16 << 10):
            yield on_ranks(size, f"sequence-{S}", partial(sequence, S, 1 << 10))
    yield on_ranks(2, "documents", partial(documents, LENGTHS))
    for dtype in (torch.float32, torch.bfloat16):
        for name, pattern in (("window", window_of), ("strided", strided)):
            measure = partial(million, pattern, 1 << 20, 1, dtype)
            yield on_ranks(2, f"million tokens-{name}-{str(dtype)[6:]}", measure)


def _alone(call: Callable[[], object]) -> Prepare:
    """The baseline: the first process, with as many threads as there are processes."""

    def run() -> object:
        if dist.get_rank():
            return None
        torch.set_num_threads(dist.get_world_size())
        result = call()
        torch.set_num_threads(1)
        return result

    return lambda: run


def _checked(name: str, got: Sequence[Tensor], expected: Sequence[Tensor], lse: float) -> float:
    """Returns the largest error of o and the gradients, relative to the largest value.

    Both are float32 results: each may differ from the exact one by the band of
    `bench.tolerance.rounding_band`, here taken twice for each.

    Raises:
        AssertionError: a result is wrong.
    """
    errors = []
    for tensor, one, exact in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        error, bound = (
            float((one - exact).abs().max()),
            4 * rounding_band(exact, exact.dtype, lse=lse),
        )
        assert error <= bound, f"{name}: {tensor} differs by {error:.3g}, more than {bound:.3g}"
        errors.append(error / float(exact.abs().max()))
    return max(errors)


def _results(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, do = inputs
    o = attend(q, k, v)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))


def _call(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], direction: Direction
) -> Callable[[], object]:
    """Returns a pass, with the graph that a forward pass of training stores."""
    if direction == "fwd":
        return lambda: attend(*inputs[:3])
    return lambda: _results(attend, inputs)


def _leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns q, k and v as leaves, and do."""
    detached = [x.detach().contiguous() for x in inputs]
    return [*(x.requires_grad_() for x in detached[:3]), detached[3]]


# Divided sequences.


@dataclass(frozen=True, kw_only=True)
class Divided(Sizes):
    """A case whose bytes are those that the busiest rank sends."""

    sent: tuple[float, float] = (math.nan, math.nan)
    """bytes of the forward pass, and of both passes"""

    def traffic(self, direction: Direction) -> float:
        return self.sent[BOTH.index(direction)]


def sequence(S: int, window: int, rank: Rank) -> list[Row]:
    """Measures ring and all-to-all attention, and predicts their times."""
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    undivided = _leaves([torch.randn(1, H, S, D, generator=generator) for _ in range(4)])
    layouts: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")
    shards = {
        layout: _leaves([shard_sequence(x, dim=2, layout=layout) for x in undivided])
        for layout in layouts
    }

    def problem(ring: int, layout: SequenceLayout, window: int | None = None) -> Call:
        return Call(
            S=S, H_q=H, H_kv=H, D=D, ring=ring, heads=size // ring, layout=layout, window=window,
            dtype=torch.float32,
        )  # fmt: skip

    problems = {
        "ring, zigzag": problem(size, "zigzag"),
        "ring, contiguous": problem(size, "contiguous"),
        f"ring, contiguous, window {window}": problem(size, "contiguous", window),
        "all-to-all": problem(1, "contiguous"),
    }
    causal = causal_sizes("divided sequence", H=H, S=S, dtype=torch.float32)
    shared = replace(Divided(**vars(causal)), name=f"divided sequence, {size} processes")
    calls: dict[tuple[Case, Direction, str], Prepare] = {}
    errors: dict[str, float] = {}
    for name, call in problems.items():
        one = replace(shared, name=f"{shared.name}: {name}")
        if call.window is not None:
            one = replace(one, mask_name="window", share=(call.window - call.window**2 / S / 2) / S)
        operator = ring_attention if call.ring > 1 else all_to_all_attention
        attend = partial(operator, mask=call.mask, layout=call.layout)
        whole = partial(attention, mask=call.mask)
        lse = attention(*undivided[:3], mask=call.mask, return_lse=True)[1].detach()
        expected = [
            shard_sequence(x, dim=2, layout=call.layout) for x in _results(whole, undivided)
        ]
        got = _results(attend, shards[call.layout])
        errors |= {name: _checked(name, got, expected, float(lse.abs().max())), BASELINE: 0.0}
        for direction in BOTH:
            calls[one, direction, BASELINE] = _alone(_call(whole, undivided, direction))
            run = _call(attend, shards[call.layout], direction)
            calls[one, direction, name] = partial(lambda run: run, run)
    rows, rates = rank.rows(calls, _rates(shards["contiguous"]), errors=errors)
    machine = _machine(shards["contiguous"], rates)
    return list(_with_predictions(rows, problems, shared, machine, rank))


def _with_predictions(
    rows: Sequence[Row],
    problems: Mapping[str, Call],
    case: Divided,
    machine: Machine,
    rank: Rank,
) -> Iterator[Row]:
    """Yields the rows, each divided call with its prediction and the rate of its messages."""
    for row in rows:
        if row.variant == BASELINE:
            yield row
            continue
        found = predict(problems[row.variant], machine)
        passes = found.forward if row.direction == "fwd" else found.both
        sent = passes.sent_within + passes.sent_between
        yield replace(row, gbytes_s=sent / row.median_ms / 1e6)
        ms = 1e3 * passes.seconds
        yield replace(
            row, variant="predicted", median_ms=ms, p20_ms=ms, p80_ms=ms,
            tflops=row.tflops * row.median_ms / ms, gbytes_s=sent / ms / 1e6,
            peak_mib=None, error=math.nan,
        )  # fmt: skip


def _rates(shard: Sequence[Tensor]) -> dict[str, Prepare]:
    """Workloads whose times are the rates of the model, on calls and messages of a shard's size."""
    q, k, v, do = shard
    rows, token = q.detach(), q.detach()[:, :, :1].contiguous()
    total = partial_results.Total(torch.zeros_like(rows), torch.zeros(2, *rows.shape[:3]))
    part = Outputs(rows, torch.zeros(2, *rows.shape[:3]), None)
    computes, exchanges = dist.get_rank() < PROCESSORS, dist.get_rank() < 2

    def on(ranks: bool, prepare: Prepare) -> Prepare:
        return prepare if ranks else lambda: lambda: None

    def backward() -> Callable[[], object]:
        o = attention(q, k, v)
        return lambda: torch.autograd.grad(o, (q, k, v), do)

    return {
        "forward": on(computes, lambda: lambda: attention(q, k, v)),
        "backward": on(computes, backward),
        "passes": on(
            computes, lambda: lambda: partial_results.add(total, slice(0, q.shape[2]), part)
        ),
        "launch": on(computes, lambda: lambda: attention(token, token, token)),
        "link": on(exchanges, _exchange(k.detach())),
        "latency": on(exchanges, _exchange(k.detach()[:, :1, :1, :1])),
    }


def _exchange(x: Tensor) -> Prepare:
    """An exchange between the first two processes, both directions at once."""
    sent, received = x.contiguous(), torch.empty_like(x.contiguous())
    peers = Peers.of(None)
    other = 1 - peers.rank

    def exchange() -> None:
        peers.exchange(to=other, sent=[sent], source=other, received=[received]).wait()

    return lambda: exchange


def _machine(shard: Sequence[Tensor], rates: Mapping[str, Timing]) -> Machine:
    q, k = shard[:2]
    seconds = {name: timing.median_ms / 1e3 for name, timing in rates.items()}
    flops = q.shape[2] ** 2 * D * H * 1e-12
    link = k.numel() * 4 / seconds["link"] * 1e-9
    return Machine(
        ranks_per_node=dist.get_world_size(),
        within=link,
        between=link,
        latency=seconds["latency"] * 1e6,
        forward=FORWARD_FLOPS * flops / seconds["forward"],
        backward=BACKWARD_FLOPS * flops / seconds["backward"],
        passes=12 * q.numel() / seconds["passes"] * 1e-9,
        launch=seconds["launch"] * 1e6,
        processors=PROCESSORS,
        overlap=False,
    )


# Packed documents.


def documents(lengths: Sequence[int], rank: Rank) -> list[Row]:
    """Measures causal packed documents."""
    size = dist.get_world_size()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    pairs = torch.arange(1, len(ids) + 1) - cu_seqlens[ids]  # keys of each token
    generator = torch.Generator().manual_seed(0)
    whole = _leaves(torch.randn(4, len(ids), H, D, generator=generator).unbind())
    mask = Mask.segments(shard_sequence(ids, dim=0)[None]) & CAUSAL

    def row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(*map(one_entry, (q, k, v)), mask=mask)[0].transpose(0, 1)

    undivided = partial(attention_varlen, cu_seqlens_q=cu_seqlens, mask=CAUSAL)
    by_document = partial(ring_attention_varlen, cu_seqlens=cu_seqlens, mask=CAUSAL)
    divided: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
        "ring_attention_varlen": (partial(shard_documents, cu_seqlens=cu_seqlens), by_document),
        "ring_attention, zigzag": (partial(shard_sequence, dim=0), row),
    }
    case = Sizes(
        name=f"{len(lengths)} documents, {size} processes", H_q=H, H_kv=H, M=len(ids), N=len(ids),
        mask_name="causal documents", share=float(pairs.sum()) / len(ids) ** 2,
    )  # fmt: skip
    calls: dict[tuple[Case, Direction, str], Prepare] = {
        (case, direction, BASELINE): _alone(_call(undivided, whole, direction))
        for direction in BOTH
    }
    errors, expected = {BASELINE: 0.0}, _results(undivided, whole)
    for name, (shard, attend) in divided.items():
        own = _leaves([shard(x) for x in whole])
        errors[name] = _checked(name, _results(attend, own), [shard(x) for x in expected], 10.0)
        most = shard(pairs).sum()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        one = replace(case, share=size * float(most) / len(ids) ** 2)
        for direction in BOTH:
            calls[one, direction, name] = partial(lambda run: run, _call(attend, own, direction))
    in_order = sorted(calls, key=lambda key: BOTH.index(key[1]))
    return rank.rows({key: calls[key] for key in in_order}, {}, errors=errors)[0]


# A million tokens.

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


def window_of(tokens: int) -> Pattern:
    """A causal sliding window."""
    size = tokens // 256
    return Pattern(
        f"window of {size}",
        Mask.window(size - 1, 0),
        "contiguous",
        tokens * size - size * (size - 1) // 2,
        lambda row, j: (j <= row) & (j > row - size),
    )


def strided(tokens: int) -> Pattern:
    """The strided pattern of the Sparse Transformer, in blocks."""
    block, stride = tokens // 1024, 16
    blocks = tokens // block
    layout = block_patterns.strided(blocks, blocks, stride)
    below = int(layout.sum()) - blocks

    def visible(row: int, j: Tensor) -> Tensor:
        distance = row // block - j // block
        return (j <= row) & ((distance < stride) | (distance % stride == 0))

    return Pattern(
        f"strided by {stride} blocks of {block}",
        CAUSAL & Mask.block_sparse(layout, block),
        "zigzag",
        below * block**2 + blocks * block * (block + 1) // 2,
        visible,
    )


def million(
    make: Callable[[int], Pattern], tokens: int, heads: int, dtype: torch.dtype, rank: Rank
) -> list[Row]:
    """Measures a forward pass, once after two others."""
    pattern, size = make(tokens), dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (
        torch.randn(1, heads, tokens // size, D, generator=generator).to(dtype) for _ in range(3)
    )
    attend = partial(ring_attention, q, k, v, mask=pattern.mask, layout=pattern.layout)
    error = _row_error(pattern, q, k, v, attend())
    assert error <= _BOUND[dtype], f"{pattern.name}: the error is {error:.1e}"
    case = Sizes(
        name=f"{pattern.name}, {size} processes", H_q=heads, H_kv=heads, M=tokens, N=tokens,
        dtype=dtype, mask_name=pattern.name, share=pattern.pairs / tokens**2,
    )  # fmt: skip
    once = replace(rank, budget=Budget(0.0, fewest=1))
    return once.rows({(case, "fwd", "ring"): lambda: attend}, {}, errors={"ring": error})[0]


def _row_error(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> float:
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
