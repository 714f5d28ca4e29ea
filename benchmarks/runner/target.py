"""Where the suite `gpu` runs: on a CUDA device or, in a rehearsal, on the CPU.

A rehearsal runs every comparison with the emulated CUDA kernels and Triton's interpreter, on a few
heads and tokens of each case, in one round. Its times mean nothing: it finds what would fail in
Python, before a GPU is there.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from benchmarks.gpu_cases import TOKENS, PackedCase, masked_cases
from transformer_kernels.bench import VARIANTS, Case

REHEARSAL = {"TRANSFORMER_KERNELS_REHEARSAL": "1", "TRITON_INTERPRET": "1"}
"""Environment variables of a rehearsal"""
IS_REHEARSAL = REHEARSAL.items() <= os.environ.items()
DEVICE = torch.device("cpu" if IS_REHEARSAL else "cuda")

REHEARSED = ("cuda_sm90", "triton")
"""Variants that a rehearsal adds to those of the CPU."""


def prepare() -> None:
    """Makes the kernels of GPUs run on the CPU, in a rehearsal."""
    if not IS_REHEARSAL:
        return
    from tests.support import emulator, triton_interpreter

    emulator.install()
    triton_interpreter.install()
    for name in REHEARSED:
        here = replace(VARIANTS[name], devices=("cpu",), unavailable_reason=lambda: None)
        VARIANTS[name] = here


def missing_reason() -> str | None:
    """Returns the reason why the suite cannot run, or None if it can."""
    if IS_REHEARSAL or torch.cuda.is_available():
        return None
    return "the suite gpu needs a CUDA device; torch finds none"


def placed(case: Case) -> Case:
    """Returns a case on the device; in a rehearsal, a part of it."""
    if not IS_REHEARSAL:
        return case.to(DEVICE)
    few = replace(case, B=1, H_q=case.H_q // case.H_kv, H_kv=1)
    if isinstance(few, PackedCase):
        return few.first(4)
    M, N = (min(length, max(length // 128, 64)) for length in (case.M, case.N))
    return replace(few, M=M, N=N, D=min(case.D, 256), D_v=min(case.D_v, 256))


def placed_masks() -> list[Case]:
    """Returns the cases with masks of several lengths on the device, likewise."""
    if not IS_REHEARSAL:
        return [case.to(DEVICE) for case in masked_cases()]
    tokens = TOKENS // 64
    return [replace(case, H_q=1, H_kv=1) for case in masked_cases(tokens, tokens)]
