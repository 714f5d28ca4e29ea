"""Measurement of a user's calls: correctness first, then memory and time, all variants in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..accuracy import run_once
from ..cases import Attend, Case, Direction, Inputs
from ..contenders import Contender, Measured, measure_contenders
from ..limits import Limits, measure_limits
from ..memory import too_large_reason
from ..provenance import Provenance
from ..steadiness import Probe, Steady, Watch, measure_steadily
from ..timer import Budget
from ..trial import failure_reason, try_out
from ..variants import Variant
from ..workload import prepare_work
from .masks import MaskOption
from .shapes import Shape

SUITE = "bench"

CHECKED_PAIRS = 2**22
"""Largest M x N that is compared with float64. Longer sequences are compared at half their length,
or a quarter, and so on."""

NAIVE_ROUNDS = 5
SLOW_SCORES = 2**22
"""Naive attention with this many scores or more runs in NAIVE_ROUNDS only: it is up to a hundred
times slower than the others."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to measure."""

    name: str
    shape: Shape
    mask: MaskOption
    dtype: torch.dtype
    device: torch.device
    directions: tuple[Direction, ...]

    def __str__(self) -> str:
        return f"{self.shape}, {self.mask.text}, {dtype_name(self.dtype)}"

    def case(self) -> Case:
        """Raises ValueError if the mask does not fit the shape."""
        return self._case(self.shape, cut=False)

    def checked_case(self) -> Case:
        """Returns the case that is compared with float64: this one, or one with fewer tokens."""
        shape = self.shape
        while shape.M * shape.N > CHECKED_PAIRS:
            shape = replace(shape, M=-(-shape.M // 2), N=-(-shape.N // 2))
        return self._case(shape, cut=True)

    def _case(self, shape: Shape, *, cut: bool) -> Case:
        mask = self.mask.mask(shape, cut=cut)
        sizes = vars(shape)
        return Case(
            name=self.name, **sizes, dtype=self.dtype, mask=mask, mask_name=self.mask.text
        ).to(self.device)


@dataclass(frozen=True)
class CallResult:
    """Measurements of a call."""

    measured: list[Measured]
    skipped: dict[str, str]
    """peers that were not measured, with their reasons"""
    broken: dict[str, str]
    """variants of ours that failed or were wrong, with their reasons"""
    checked_tokens: int
    """number of keys at which the errors were measured"""


@dataclass(frozen=True)
class Comparison:
    """Result of a run."""

    provenance: Provenance
    calls: Steady[Call, CallResult]
    limits: dict[str, Limits]
    """by dtype"""

    @property
    def results(self) -> list[tuple[Call, CallResult]]:
        """Those of all calls, the disturbed ones last."""
        return [*self.calls.results, *((one.item, one.result) for one in self.calls.disturbed)]

    @property
    def measured(self) -> list[Measured]:
        return [one for _, result in self.results for one in result.measured]


def compare(
    calls: Sequence[Call],
    variants: Sequence[Variant],
    *,
    budget: Budget,
    tolerance: float,
    on_call: Callable[[Call], None] = lambda _call: None,
) -> Comparison:
    """Measures all variants on all calls, which share one device.

    Args:
        calls: what to measure; `Call.case` has shown that the masks fit.
        variants: implementations.
        budget: time for each call and direction, for all variants together.
        tolerance: how much slower than usual the machine may be during a measurement, as a
            fraction; see `measure_steadily`.
        on_call: called before each measurement.

    Raises:
        DeviceLostError: a variant has caused a fault of the CUDA device.
    """
    (device,) = {call.device for call in calls}
    provenance = Provenance.now().on(device)
    watch = Watch(Probe(device))

    def measure(call: Call) -> CallResult:
        on_call(call)
        return measure_call(call, variants, budget, provenance)

    limits = {
        dtype_name(dtype): measure_limits(dtype, device)
        for dtype in dict.fromkeys(call.dtype for call in calls)
    }
    return Comparison(
        provenance, measure_steadily(calls, measure, watch, tolerance=tolerance), limits
    )


def measure_call(
    call: Call,
    variants: Iterable[Variant],
    budget: Budget,
    provenance: Provenance,
    *,
    suite: str = SUITE,
    besides: Callable[[Case, Direction], Sequence[Contender]] = lambda _case, _direction: (),
    naive_scores: float = math.inf,
) -> CallResult:
    """Measures one call once.

    Args:
        call: the call.
        variants: implementations.
        budget: time for each direction, for all variants together.
        provenance: shared columns of the rows.
        suite: name of the suite, a column of the rows.
        besides: further workloads of a case, which run in the same rounds.
        naive_scores: naive attention is measured for fewer scores, B H_q M N, than this.
    """
    case, part = call.case(), call.checked_case()
    fitting, skipped = _fitting(case, variants, naive_scores)
    trial = try_out(part, fitting)
    attends, inputs = trial.checked.attends, trial.checked.inputs
    failures: dict[str, str] = {}
    if (part.M, part.N) != (case.M, case.N):
        inputs = case.inputs()
        passed = [variant for variant in fitting if variant.name in attends]
        attends, failures = _at_full_length(case, inputs, passed)
    measured: list[Measured] = []
    for direction in call.directions if attends else ():
        contenders = [
            Contender(
                case=case,
                direction=direction,
                variant=name,
                prepare=prepare_work(attend, inputs, direction),
                error=trial.checked.outputs[name].error(trial.checked.expected.exact, direction),
                most_rounds=_most_rounds(name, case) if len(attends) > 1 else None,
            )
            for name, attend in attends.items()
        ]
        contenders += besides(case, direction)
        measured += measure_contenders(
            contenders, provenance=provenance, suite=suite, budget=budget
        )
    peers = {variant.name for variant in fitting if variant.is_peer}
    skipped |= trial.skipped | {name: failures[name] for name in failures.keys() & peers}
    broken = trial.broken | {name: failures[name] for name in failures.keys() - peers}
    return CallResult(measured, skipped, broken, part.N)


def _fitting(
    case: Case, variants: Iterable[Variant], naive_scores: float
) -> tuple[list[Variant], dict[str, str]]:
    """Returns the variants whose memory and time fit, and the reasons of the others."""
    fitting, reasons = [], {}
    for variant in variants:
        reason = _naive_reason(case, naive_scores) if variant.name == "naive" else None
        if reason is None:
            fitting.append(variant)
        else:
            reasons[variant.name] = reason
    return fitting, reasons


def _naive_reason(case: Case, most: float) -> str | None:
    """Why naive attention is not measured; None if it is."""
    if _scores(case) >= most:
        return f"naive attention is measured with fewer than {most:g} scores here"
    return too_large_reason(case)


def _scores(case: Case) -> int:
    return case.B * case.H_q * case.M * case.N


def _at_full_length(
    case: Case, inputs: Inputs, variants: Iterable[Variant]
) -> tuple[dict[str, Attend], dict[str, str]]:
    """Returns the calls of the variants that run, and the reasons of the others."""
    attends, reasons = {}, {}
    for variant in variants:
        attend = variant.attend_for(case)
        reason = failure_reason(partial(_run, attend, inputs))
        if reason is None:
            attends[variant.name] = attend
        else:
            reasons[variant.name] = reason
    return attends, reasons


def _run(attend: Attend, inputs: Inputs) -> None:
    run_once(attend, inputs)


def _most_rounds(variant: str, case: Case) -> int | None:
    is_slow = variant == "naive" and _scores(case) >= SLOW_SCORES
    return NAIVE_ROUNDS if is_slow else None
