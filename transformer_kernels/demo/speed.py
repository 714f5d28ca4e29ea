"""The first part of the demo: naive, torch's and fused attention by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from transformer_kernels.bench import (
    Case,
    Direction,
    Interleaver,
    Provenance,
    Row,
    exact_outputs,
    make_row,
    peak_extra_bytes,
    prepare_work,
    run_once,
    usable_variants,
)
from transformer_kernels.bench.memory import available_bytes
from transformer_kernels.demo.settings import DemoSettings
from transformer_kernels.masks.mask import Mask

DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
SUITE = "demo"

_SCORES_AT_ONCE = 5
"""M x N float32 matrices that naive attention holds in a training step, with some to spare."""


def length_cases(settings: DemoSettings) -> list[Case]:
    """Causal attention in float32, over sequence lengths."""
    return [
        _case(settings, "causal", length, mask=Mask.causal(), mask_name="causal")
        for length in settings.lengths
    ]


def other_cases(settings: DemoSettings) -> list[Case]:
    """Masks that hide most pairs, and bfloat16."""
    S = settings.masked_length
    padding = Mask.padding(torch.arange(4, 0, -1) * S // 8)
    documents = Mask.segments(torch.arange(S)[None] // (S // 8)) & Mask.causal()
    padded = _case(settings, "padded", S // 2, B=4, mask=padding, mask_name="padding")
    causal = _case(settings, "causal", S, mask=Mask.causal(), mask_name="causal")
    packed = _case(settings, "packed", S, mask=documents, mask_name="segments and causal")
    return [padded, packed, *(replace(one, dtype=torch.bfloat16) for one in (causal, packed))]


def _case(settings: DemoSettings, name: str, length: int, **options: Any) -> Case:
    heads, width = settings.heads, settings.width
    return Case(name=name, H_q=heads, H_kv=heads, M=length, N=length, D=width, D_v=width, **options)


def why_too_large(case: Case) -> str | None:
    """Where naive attention, the hungriest variant, would not fit into memory; else None."""
    needed = _SCORES_AT_ONCE * case.B * case.H_q * case.M * case.N * case.dtype.itemsize
    available = available_bytes()
    if available is None or needed < available:
        return None
    return f"where naive attention needs {needed / 2**30:.1f} GiB, more than is free"


class Pace:
    """Foresees the time of a case, in proportion to its pairs of queries and keys."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._seconds_a_pair = 0.0

    def why_too_slow(self, case: Case) -> str | None:
        """Where the case would end after the time that was given; else None."""
        foreseen = self._seconds_a_pair * pairs(case)
        if time.perf_counter() + foreseen < self._end:
            return None
        return f"which would take some {foreseen:.0f} s more"

    @contextmanager
    def timed(self, case: Case) -> Iterator[None]:
        """Around the measuring of a case."""
        start = time.perf_counter()
        yield
        self._seconds_a_pair = (time.perf_counter() - start) / pairs(case)


def pairs(case: Case) -> int:
    """Pairs of queries and keys, hidden or not."""
    return case.B * case.M * case.N


def measure(case: Case, settings: DemoSettings, provenance: Provenance) -> Iterator[Row]:
    """One row a direction and variant, each direction's when they are there.

    Errors first, then memory, then times, in which the variants take turns.
    """
    inputs = case.inputs()
    exact = exact_outputs(case, inputs)
    attends = {variant.name: variant.bind(case) for variant in usable_variants()}
    outputs = {name: run_once(attend, inputs) for name, attend in attends.items()}
    for direction in DIRECTIONS:
        work = {name: prepare_work(attend, inputs, direction) for name, attend in attends.items()}
        peaks = {name: peak_extra_bytes(prepare) for name, prepare in work.items()}
        timings = Interleaver(work).run(settings.budget)
        for name in work:
            yield make_row(
                provenance,
                suite=SUITE,
                case=case,
                direction=direction,
                variant=name,
                timing=timings[name],
                peak_bytes=peaks[name],
                error=outputs[name].error(exact, direction),
            )
