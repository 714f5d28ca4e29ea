"""Trial of a case: every variant runs once, and those that fail or are wrong are excluded."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from .accuracy import Outputs, exact_outputs, run_once
from .cases import Attend, Case, Inputs
from .contenders import CheckedCase, Expected, assert_correct
from .variants import VARIANTS, Variant

FAILURES = (RuntimeError, ValueError, AssertionError)
"""Exceptions that exclude a variant: torch's errors, such as out of memory; ValueError for options
and masks that it is not measured with; AssertionError for an error beyond the tolerance."""


class DeviceLostError(Exception):
    """A kernel fault: every later CUDA call of the process fails."""


@dataclass(frozen=True)
class Trial:
    """Result of checking all variants of a case."""

    checked: CheckedCase
    skipped: dict[str, str]
    """peers that cannot run the case, with their reasons"""
    broken: dict[str, str]
    """variants of ours that fail or are wrong, with their reasons"""
    seconds: dict[str, float]
    """duration of each variant's first forward and backward pass, mostly compilation"""


def try_out(case: Case, variants: Iterable[Variant]) -> Trial:
    """Runs every variant once on all heads, and compares the first and the last with float64.

    All heads have the same mask, and float64 scores of all of them may not fit in memory. With
    grouped queries, the heads that share the first and the last key head are compared. A variant
    that fails is not measured; the others still are.

    Raises:
        DeviceLostError: a variant has caused a fault of the CUDA device.
    """
    group = case.H_q // case.H_kv
    keys = sorted({0, case.H_kv - 1})
    queries = [h * group + i for h in keys for i in range(group)]
    inputs = case.inputs()
    q, k, v, do = inputs
    part = replace(case, H_q=len(queries), H_kv=len(keys))
    part_inputs = Inputs(q[:, queries], k[:, keys], v[:, keys], do[:, queries])
    naive = run_once(VARIANTS["naive"].attend_for(part), part_inputs)
    expected = Expected(exact_outputs(part, part_inputs), naive)
    attends: dict[str, Attend] = {}
    outputs: dict[str, Outputs] = {}
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for variant in variants:

        def attempt(variant: Variant = variant) -> None:
            attend = variant.attend_for(case)
            o, dq, dk, dv, _ = run_once(attend, inputs)
            got = Outputs(o[:, queries], dq[:, queries], dk[:, keys], dv[:, keys])
            assert_correct(variant.name, case, got, expected)
            attends[variant.name], outputs[variant.name] = attend, got

        start = time.perf_counter()
        reason = failure_reason(attempt)
        if reason is not None:
            (skipped if variant.is_peer else broken)[variant.name] = reason
        seconds[variant.name] = time.perf_counter() - start
    return Trial(CheckedCase(case, inputs, attends, outputs, expected), skipped, broken, seconds)


def failure_reason(attempt: Callable[[], object]) -> str | None:
    """Returns the first line of the exception and of torch's warnings, or None if it succeeds.

    Raises:
        DeviceLostError: the attempt has caused a fault of the CUDA device.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
        except FAILURES as error:
            messages = [str(error), *(str(warning.message) for warning in caught)]
        else:
            return None
    if torch.cuda.is_available():
        check_device()
        torch.cuda.empty_cache()  # after an out-of-memory error the cache is fragmented
    return "; ".join(dict.fromkeys(filter(None, map(_first_line, messages))))


def check_device() -> None:
    """Raises DeviceLostError after a kernel fault."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(
            f"the device is lost to this process: {_first_line(str(error))}"
        ) from error


def _first_line(text: str) -> str:
    """First line of a message, without its position in torch and reasons of other kernels."""
    line = text.strip().split("\n")[0].split(" (Triggered internally")[0].strip()
    return "" if "not used because" in line or "runtime disabled" in line else line
