"""Part one of the demo: naive, torch SDPA and fused attention alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..bench import (
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
from ..masks.mask import Mask
from .settings import DemoSettings

DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
SUITE = "demo"


def length_cases(settings: DemoSettings) -> list[Case]:
    """Causal float32 attention at each sequence length."""
    return [
        _case(settings, "causal", length, mask=Mask.causal(), mask_name="causal")
        for length in settings.lengths
    ]


def other_cases(settings: DemoSettings) -> list[Case]:
    """Masks that hide most query-key pairs, and bfloat16."""
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


class TimeEstimator:
    """Predicts the time of a case from the previous one, in proportion to its query-key pairs."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._seconds_per_pair = 0.0

    def too_slow_reason(self, case: Case) -> str | None:
        """Reason why the case would exceed the time limit; None if it would not."""
        predicted = self._seconds_per_pair * pairs(case)
        if time.perf_counter() + predicted < self._end:
            return None
        return f"it would take about {predicted:.0f} s more"

    @contextmanager
    def observe(self, case: Case) -> Iterator[None]:
        """Context that times the measurement of a case."""
        start = time.perf_counter()
        yield
        self._seconds_per_pair = (time.perf_counter() - start) / pairs(case)


def pairs(case: Case) -> int:
    """Number of query-key pairs, visible and hidden."""
    return case.B * case.M * case.N


def measure(case: Case, settings: DemoSettings, provenance: Provenance) -> Iterator[Row]:
    """Yields one row per direction and variant, as soon as a direction is measured.

    Measures errors, then peak memory, then times. The variants are timed interleaved.
    """
    inputs = case.inputs()
    exact = exact_outputs(case, inputs)
    attends = {variant.name: variant.attend_for(case) for variant in usable_variants()}
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
