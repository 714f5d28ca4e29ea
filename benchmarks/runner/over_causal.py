"""Interleaved times of self-attention functions over those of fused causal attention."""

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

D = 64
"""Head size"""


@dataclass(frozen=True)
class Row:
    """Times are medians, relative to causal attention."""

    length: int
    direction: str
    variant: str
    ms: float
    ratio: float
    mib: float | None


def projected_inputs(length: int, heads: int, dtype: torch.dtype) -> Inputs:
    """Random normal q, k, v and do, (1, heads, length, D) each: heads of one projection."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(1, length, heads, D, generator=generator).to(dtype).transpose(1, 2)

    return Inputs(normal(), normal(), normal(), normal())


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=Mask.causal())


def measure(
    attends: dict[str, Attend],
    inputs: Inputs,
    seconds: float,
    *,
    causal_rounds: int | None = None,
) -> Iterator[Row]:
    """Measures causal attention and the functions interleaved, in both directions.

    Args:
        attends: functions by name, already checked.
        inputs: result of `projected_inputs`.
        seconds: time for each direction.
        causal_rounds: rounds of causal attention, where each takes minutes. Default: all.
    """
    most = {} if causal_rounds is None else {"causal": causal_rounds}
    attends = {"causal": causal} | attends
    for direction in ("fwd", "fwd+bwd"):
        work = {
            name: prepare_work(each, inputs, direction, may_ignore=True)
            for name, each in attends.items()
        }
        timings = Interleaver(work, most).run(Budget(seconds))
        for name, timing in timings.items():
            peak = peak_extra_bytes(work[name])
            yield Row(
                inputs[0].shape[2], direction, name, timing.median_ms,
                timing.median_ms / timings["causal"].median_ms,
                None if peak is None else peak / 2**20,
            )  # fmt: skip


def add_options(parser: argparse.ArgumentParser, *, lengths: list[int], heads: int = 2) -> None:
    """Adds --lengths, --heads, --dtype, --threads and --seconds."""
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths, metavar="T")
    parser.add_argument("--heads", type=int, default=heads, help="number of heads, even")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each direction")


def cells(row: Row) -> str:
    """The last cells of a table row: ms, over causal, peak MiB."""
    peak = "-" if row.mib is None else f"{row.mib:.1f}"
    return f"{row.ms:.1f} | {row.ratio:.3f} | {peak} |"
