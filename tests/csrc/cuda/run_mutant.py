"""Runs the cases of a mutant, in a process that loads its library."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from tests.csrc.cuda.hopper_cases import HOPPER_CASES, HOPPER_VARLEN
from tests.csrc.cuda.mutants import DECODING, LINEAR, PACKED, RACE_CHECKED, STEPS, Mutant
from tests.support import emulator
from tests.support.case import AnyCase, assert_case
from tests.support.cases import CASES
from tests.support.decode_cases import DECODE_CASES
from tests.support.linear import LINEAR_CASES, steps_case
from tests.support.varlen_cases import VARLEN_CASES
from transformer_kernels.dispatch.operators import register_attention
from transformer_kernels.linear.derivatives import register_linear

SCHEDULES = (0, 1, 2)


def send_outcomes(sender: Connection, library: str, mutant: Mutant) -> None:
    """Sends one line for each case and schedule: "ok", or an error message."""
    torch.ops.load_library(library)
    register_attention(RACE_CHECKED.library)
    register_linear(RACE_CHECKED.library)
    emulator.emulate(RACE_CHECKED.library)
    operators = getattr(torch.ops, RACE_CHECKED.library)
    operators.report_races(True)
    operators.want_poison(True)
    torch.use_deterministic_algorithms(mutant.deterministic)
    cases: dict[str, AnyCase] = {case.name: case for case in (*CASES, *HOPPER_CASES)}
    cases |= {DECODING + case.name: case for case in DECODE_CASES}
    cases |= {PACKED + case.name: case for case in (*VARLEN_CASES, *HOPPER_VARLEN)}
    cases |= {STEPS: steps_case(20, 100)} | {LINEAR + case.name: case for case in LINEAR_CASES}
    operators.set_aimed_ctas(mutant.aimed_ctas)
    lines = []
    for name in mutant.cases:
        for seed in SCHEDULES:
            with emulator.schedule(seed), emulator.chip(mutant.chip):
                lines.append(_outcome(cases[name], getattr(torch, mutant.dtype)))
    sender.send(lines)


def _outcome(case: AnyCase, dtype: torch.dtype) -> str:
    try:
        assert_case(case, dtype, "cuda")
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())
    return "ok"
