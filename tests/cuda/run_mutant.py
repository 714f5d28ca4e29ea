"""`run_mutant LIBRARY DTYPE DETERMINISTIC CASE...`: a line for each case and schedule."""

from __future__ import annotations

import sys

import torch

from tests.cuda.mutants import DECODING, WATCHED
from transformer_kernels import ops
from transformer_kernels.backends import cuda
from transformer_kernels.testing import emulator
from transformer_kernels.testing.cases import CASES, Case
from transformer_kernels.testing.decoding import DECODE_CASES, DecodeCase, assert_decode_case
from transformer_kernels.testing.results import assert_case

SCHEDULES = (0, 1, 2)


def main(library: str, dtype: str, deterministic: str, *names: str) -> None:
    torch.ops.load_library(library)
    ops.register_fakes(WATCHED.library)
    cuda.emulate(WATCHED.library)
    operators = getattr(torch.ops, WATCHED.library)
    operators.report_races(True)
    operators.want_poison(True)
    torch.use_deterministic_algorithms(deterministic == "1")
    cases: dict[str, Case | DecodeCase] = {case.name: case for case in CASES}
    cases |= {DECODING + case.name: case for case in DECODE_CASES}
    for name in names:
        for seed in SCHEDULES:
            with emulator.schedule(seed):
                print(_outcome(cases[name], getattr(torch, dtype)))


def _outcome(case: Case | DecodeCase, dtype: torch.dtype) -> str:
    try:
        if isinstance(case, DecodeCase):
            assert_decode_case(case, dtype, "cuda")
        else:
            assert_case(case, dtype, "cuda")
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())
    return "right"


if __name__ == "__main__":
    main(*sys.argv[1:])
