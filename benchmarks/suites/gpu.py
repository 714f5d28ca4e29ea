"""Torch's kernels and ours on a CUDA device, within a time limit.

Budgets are a fifth of those of other suites, because a round takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch

from benchmarks.gpu_cases import (
    PackedCase,
    ceiling_cases,
    decode_cases,
    deterministic_cases,
    grid_cases,
    linear_cases,
    masked_cases,
    name_of,
    packed_case,
)
from benchmarks.runner import target
from benchmarks.runner.caches import Caches
from benchmarks.runner.isolated import COMPILED, compile_ahead, smoke_failures
from benchmarks.runner.packed import PackedContenders, by
from benchmarks.runner.run import Comparison, Measurement, NotMeasuredError, Run
from benchmarks.suites.linear import LinearContenders
from transformer_kernels.backends import CudaBackend
from transformer_kernels.bench import VARIANTS, Case, Direction
from transformer_kernels.bench.contenders import CheckedCase, Contender
from transformer_kernels.bench.trial import Trial, try_out
from transformer_kernels.bench.workload import Workload

NAIVE_ROUNDS = 3
FLEX_SHARE = 0.5
"""Fraction of the time limit for compiling FlexAttention, which takes seconds per case."""
AHEAD_SHARE = 0.2
"""Fraction of the time limit for compiling in parallel, before the first measurement."""
ONE_CASE = 10.0
"""Seconds per case: with less time left, no further case is started."""
BUDGET = 0.2
"""Fraction of the time budget of a measurement."""
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")


def comparisons() -> Iterator[Comparison]:
    yield _comparison("smoke test", smoke_test)
    for case in ceiling_cases():
        yield _comparison(case.name, ceiling, case)
    for case in decode_cases():
        yield _comparison(name_of(case), decode, case)
    for case in linear_cases():
        yield _comparison(name_of(case), linear, case)
    yield _comparison(name_of(packed_case()), packed, packed_case())
    for case in deterministic_cases():
        yield _comparison(name_of(case), deterministic, case)
    yield _comparison("masks", masks)
    for case in grid_cases():
        yield replace(_comparison(name_of(case), grid, case), case=case)


def _comparison(name: str, measure: Callable[..., Iterator[Measurement]], *of: Case) -> Comparison:
    def measurements(run: Run) -> Iterator[Measurement]:
        if (reason := target.missing_reason()) is not None:
            raise NotMeasuredError(reason)
        if run.time_left < ONE_CASE:
            raise NotMeasuredError(f"the suite's time limit of {run.time_limit:.0f} s is used up")
        yield from measure(run, *map(target.placed, of))

    return Comparison(name=name, measurements=measurements, device=target.DEVICE)


@cache
class Trials:
    """Variants of a run that pass the smoke test, and their trials on cases; one for each run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._flex_seconds = FLEX_SHARE * run.time_limit
        """left for compiling FlexAttention"""

    @cached_property
    def failing(self) -> dict[str, str]:
        """Our variants that fail the smoke test, with reasons; they are not measured."""
        return smoke_failures(
            [one.name for one in self._run.usable(target.DEVICE) if not one.is_peer]
        )

    @cached_property
    def _compiled(self) -> list[str]:
        """Compiles the selected cases, in their order; returns their names."""
        names: list[str] = []
        for one in self._run.selected:
            if one.case is not None:
                names.append(name_of(one.case))
            elif one.device == target.DEVICE and one.name == "masks":
                names += map(name_of, masked_cases())
        usable = [
            one.name for one in self._run.usable(target.DEVICE) if one.name not in self.failing
        ]
        if variants := [name for name in usable if name in COMPILED]:
            most = 2 if target.IS_REHEARSAL else None
            compile_ahead(names[:most], variants, AHEAD_SHARE * self._run.time_limit)
        return names

    def trial(self, case: Case) -> Trial:
        """Checks a case and records the variants skipped, with reasons."""
        assert self._compiled is not None
        chosen = [one for one in self._run.usable(target.DEVICE) if one.name not in self.failing]
        without = self._flex_seconds <= 0
        trial = try_out(case, [one for one in chosen if not (without and one.name == "flex")])
        self._flex_seconds -= trial.seconds.get("flex", 0.0)
        if without:
            trial.skipped["flex"] = "its compilation budget is used up"
        note_skipped(self._run, case, trial.skipped | trial.broken)
        return trial


def note_skipped(run: Run, case: Case, reasons: dict[str, str]) -> None:
    run.skipped += [f"{name_of(case)}: {name}: {why}" for name, why in reasons.items()]


def smoke_test(run: Run) -> Iterator[Measurement]:
    """Measures nothing: fails if a variant of ours does not pass the smoke test."""
    assert Trials(run).failing == {}
    yield from ()


def ceiling(run: Run, case: Case) -> Iterator[Measurement]:
    """Hardware ceilings: a large matrix product and a large copy."""
    name = case.name.split()[-1]
    workload = {"matmul": large_product, "copy": large_copy}[name](case)
    contender = Contender(case, "fwd", name, lambda: workload, math.nan)
    yield run.timed([contender], run.share(BUDGET))


def large_product(case: Case) -> Workload:
    x, y = (torch.randn(case.M, case.M, device=case.device).to(case.dtype) for _ in range(2))
    return lambda: x @ y


def large_copy(case: Case) -> Workload:
    source, copy = (
        torch.empty(2 * case.D, dtype=case.dtype, device=case.device).normal_() for _ in range(2)
    )
    return lambda: copy.copy_(source)


def decode(run: Run, case: Case) -> Iterator[Measurement]:
    """Contiguous and paged caches, beside a copy of equal size and uncached peers."""
    failing = Trials(run).failing
    reason = CudaBackend().unavailable_reason()
    reason = reason or failing.get("cuda_sm90", failing.get("cuda_sm80"))
    if reason is not None:
        raise NotMeasuredError(reason)
    caches = Caches(case)
    contenders, skipped = caches.peers(VARIANTS[f"sdpa_{name}"] for name in ("flash", "cudnn"))
    note_skipped(run, case, skipped)
    contenders += [caches.copy(), *caches.ours("cuda_sm80", "cuda")]
    yield run.timed(contenders, run.share(BUDGET))


def linear(run: Run, case: Case) -> Iterator[Measurement]:
    """Linear attention, and causal attention of the same sizes."""
    found = LinearContenders(case, {"cuda": "cuda", "triton": "triton", "chunks": "reference"})
    note_skipped(run, case, found.skipped)
    for direction in DIRECTIONS:
        yield run.timed(found.contenders(direction), run.share(BUDGET))
    assert_measured(found.skipped)


def assert_measured(skipped: Mapping[str, str]) -> None:
    """Raises AssertionError if kernels of ours that are built were skipped."""
    wanted = {"triton"} if CudaBackend().unavailable_reason() else {"cuda", "triton"}
    assert not skipped.keys() & wanted, skipped


def packed(run: Run, case: PackedCase) -> Iterator[Measurement]:
    """Packed documents; torch's kernel for them is that of FlashAttention 2."""
    found = PackedContenders(case, {name: by(name) for name in ("cuda", "triton")})
    note_skipped(run, case, found.skipped)
    for direction in DIRECTIONS:
        yield run.timed(found.contenders(direction), run.share(BUDGET))
    assert_measured(found.skipped)


def deterministic(run: Run, case: Case) -> Iterator[Measurement]:
    """Backward passes of our kernels, each with and without torch's deterministic mode."""
    trial = Trials(run).trial(case)
    checked = trial.checked
    ours = [name for name in checked.attends if not VARIANTS[name].is_peer]
    contenders = checked.contenders("bwd", ours)
    yield run.timed([*contenders, *map(in_order, contenders)], run.share(BUDGET))
    assert trial.broken == {}


def in_order(contender: Contender) -> Contender:
    """Returns the contender in torch's deterministic mode."""

    def prepare() -> Workload:
        workload = contender.prepare()

        def work() -> None:
            with deterministic_mode():
                workload()

        return work

    return replace(contender, prepare=prepare, variant=f"{contender.variant}, deterministic")


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """Torch's deterministic algorithms, without its writes to uninitialized memory."""
    memory: Any = torch.utils.deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
        memory.fill_uninitialized_memory = fills


def masks(run: Run) -> Iterator[Measurement]:
    """Interleaves all masks, because the cost of a mask is a ratio."""
    torch.compiler.reset()
    trials = [Trials(run).trial(case) for case in target.placed_masks()]
    yield from _measured(run, [trial.checked for trial in trials])
    assert [trial.broken for trial in trials if trial.broken] == []


def grid(run: Run, case: Case) -> Iterator[Measurement]:
    torch.compiler.reset()
    trial = Trials(run).trial(case)
    yield from _measured(run, [trial.checked])
    assert trial.broken == {}


def _measured(run: Run, cases: Sequence[CheckedCase]) -> Iterator[Measurement]:
    for direction in DIRECTIONS:
        contenders = [
            one
            for checked in cases
            for one in checked.contenders(direction, naive_rounds=NAIVE_ROUNDS)
        ]
        yield run.timed(contenders, run.share(BUDGET))
