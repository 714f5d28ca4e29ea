"""Measurement of a user's calls: correctness first, then memory and time, all variants in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..accuracy import run_once
from ..cases import Case, Direction
from ..contenders import Contender, Measured, measure_contenders
from ..limits import Limits, measure_limits
from ..memory import too_large_reason
from ..provenance import Provenance
from ..steadiness import Probe, Steady, Watch, measure_steadily
from ..timer import Budget
from ..trial import failure_reason, try_out
from ..variants import Variant
from .calls import Call

SUITE = "bench"

NAIVE_ROUNDS = 5
SLOW_SCORES = 2**22
"""Naive attention with this many scores or more runs in NAIVE_ROUNDS only: it is up to a hundred
times slower than the others."""


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
    dtypes = {call.dtype_name: call.dtype for call in calls}
    limits = {name: measure_limits(dtype, device) for name, dtype in dtypes.items()}

    def measure(call: Call) -> CallResult:
        on_call(call)
        return measure_call(call, variants, budget, provenance)

    steady = measure_steadily(calls, measure, watch, tolerance=tolerance)
    return Comparison(provenance, steady, limits)


def measure_call(
    call: Call,
    variants: Sequence[Variant],
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
    scores = case.B * case.H_q * case.M * case.N
    reason = too_large_reason(case)
    if scores >= naive_scores:
        reason = f"naive attention is measured with fewer than {naive_scores:g} scores here"
    failed = {} if reason is None else {"naive": reason}
    fitting = [variant for variant in variants if variant.name not in failed]
    trial = try_out(part, fitting)
    failed |= trial.skipped | trial.broken
    attends, inputs = trial.checked.attends, trial.checked.inputs
    if (part.M, part.N) != (case.M, case.N):
        inputs = case.inputs()
        attends = {one.name: one.attend_for(case) for one in fitting if one.name in attends}
        for name, attend in list(attends.items()):
            if (reason := failure_reason(partial(run_once, attend, inputs))) is not None:
                failed[name] = reason
                del attends[name]
    checked = replace(trial.checked, case=case, inputs=inputs, attends=attends)
    few = NAIVE_ROUNDS if scores >= SLOW_SCORES and len(attends) > 1 else None
    measured: list[Measured] = []
    for direction in call.directions if attends else ():
        contenders = [*checked.contenders(direction, naive_rounds=few), *besides(case, direction)]
        measured += measure_contenders(
            contenders, provenance=provenance, suite=suite, budget=budget
        )
    reasons = [(one.is_peer, one.name, failed[one.name]) for one in variants if one.name in failed]
    return CallResult(
        measured,
        skipped={name: reason for is_peer, name, reason in reasons if is_peer},
        broken={name: reason for is_peer, name, reason in reasons if not is_peer},
        checked_tokens=part.N,
    )
