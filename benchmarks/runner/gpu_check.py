"""Which variants of a case on a GPU are right, and why others are not measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.runner.measure import CheckedCase, Truth, assert_right
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

HEADS = (0, -1)
"""Those that are checked. Every head has the same mask, and float64 scores of all would not fit."""

REFUSALS = (RuntimeError, ValueError, AssertionError)
"""What a variant may answer to a case: torch's errors, out of memory among them; for options and
masks that it is not measured with, ours; and an error larger than the tests allow."""


@dataclass(frozen=True)
class Trial:
    """A case, checked."""

    checked: CheckedCase
    left_out: dict[str, str]
    """Peers that cannot run it, and why"""
    broken: dict[str, str]
    """Ours that cannot, or err"""
    seconds: dict[str, float]
    """What each one's first call took, forward and backward; compiling is most of it"""


def try_out(case: Case, variants: Iterable[Variant]) -> Trial:
    """Runs every variant once, on all heads, and holds those of HEADS against float64.

    One that cannot is not measured, and the others are: a fault of ours costs no peer its rows.
    """
    inputs = case.inputs()
    part, few = replace(case, H_q=len(HEADS), H_kv=len(HEADS)), Inputs(*map(_some_heads, inputs))
    naive = run_once(VARIANTS["naive"].bind(part), few)
    truth = Truth(exact_outputs(part, few), naive)
    attends: dict[str, Attend] = {}
    outputs: dict[str, Outputs] = {}
    left_out: dict[str, str] = {}
    broken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for variant in variants:

        def attempt(variant: Variant = variant) -> None:
            attend = variant.bind(case)
            got = Outputs(*map(_some_heads, run_once(attend, inputs)[:4]))
            assert_right(variant.name, case, got, truth)
            attends[variant.name], outputs[variant.name] = attend, got

        start = time.perf_counter()
        reason = why_refused(attempt)
        if reason is not None:
            (left_out if variant.is_peer else broken)[variant.name] = reason
        seconds[variant.name] = time.perf_counter() - start
    return Trial(CheckedCase(case, inputs, attends, outputs, truth), left_out, broken, seconds)


def _some_heads(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x[:, list(HEADS)]


def why_refused(attempt: Callable[[], None]) -> str | None:
    """The first line of what it raised, with what torch warned of before; None if nothing."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            attempt()
        except REFUSALS as error:
            said = [str(error), *(str(warning.message) for warning in heard)]
        else:
            return None
    if torch.cuda.is_available():
        end_if_device_is_lost()
        torch.cuda.empty_cache()  # what ran out of memory has left it in pieces
    return "; ".join(dict.fromkeys(filter(None, map(_essence, said))))


def end_if_device_is_lost() -> None:
    """After a fault of a kernel every call fails: then the run ends, with what it has."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device is lost to this process: {_essence(str(error))}", returncode=3)


def _essence(text: str) -> str:
    """One line, without where in torch it was said, and without other kernels' reasons."""
    line = text.strip().split("\n")[0].split(" (Triggered internally")[0].strip()
    return "" if "not used because" in line or "runtime disabled" in line else line
