"""Correctness check of the variants of a GPU case, with the reasons of those not measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.runner.measure import CheckedCase, Expected, assert_correct
from transformer_kernels.bench import (
    VARIANTS,
    Attend,
    Case,
    Inputs,
    Outputs,
    Variant,
    exact_outputs,
    run_once,
)

CHECKED_HEADS = (0, -1)
"""Heads that are checked. All have the same mask; float64 scores of all would not fit in memory."""

FAILURES = (RuntimeError, ValueError, AssertionError)
"""Exceptions that exclude a variant: torch's errors, such as out of memory; ValueError for options
and masks that it is not measured with; AssertionError for an error beyond the tolerance."""


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
    """Runs every variant once on all heads, and compares CHECKED_HEADS with float64.

    A variant that fails is not measured; the others still are.
    """
    inputs = case.inputs()
    part = replace(case, H_q=len(CHECKED_HEADS), H_kv=len(CHECKED_HEADS))
    part_inputs = Inputs(*map(_checked_heads, inputs))
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
            got = Outputs(*map(_checked_heads, run_once(attend, inputs)[:4]))
            assert_correct(variant.name, case, got, expected)
            attends[variant.name], outputs[variant.name] = attend, got

        start = time.perf_counter()
        reason = failure_reason(attempt)
        if reason is not None:
            (skipped if variant.is_peer else broken)[variant.name] = reason
        seconds[variant.name] = time.perf_counter() - start
    return Trial(CheckedCase(case, inputs, attends, outputs, expected), skipped, broken, seconds)


def _checked_heads(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x[:, list(CHECKED_HEADS)]


def failure_reason(attempt: Callable[[], None]) -> str | None:
    """Returns the first line of the exception and of torch's warnings, or None if it succeeds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
        except FAILURES as error:
            messages = [str(error), *(str(warning.message) for warning in caught)]
        else:
            return None
    if torch.cuda.is_available():
        end_if_device_is_lost()
        torch.cuda.empty_cache()  # after an out-of-memory error the cache is fragmented
    return "; ".join(dict.fromkeys(filter(None, map(_first_line, messages))))


def end_if_device_is_lost() -> None:
    """Ends the run after a kernel fault, since every later CUDA call of the process fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device is lost to this process: {_first_line(str(error))}", returncode=3)


def _first_line(text: str) -> str:
    """First line of a message, without its position in torch and reasons of other kernels."""
    line = text.strip().split("\n")[0].split(" (Triggered internally")[0].strip()
    return "" if "not used because" in line or "runtime disabled" in line else line
