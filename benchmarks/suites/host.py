"""What the host takes for a short call: Python, checks, allocations and launches.

The CUDA kernels are those of the emulator, whose launches do nothing here. So the suite needs no
GPU, and times what a GPU would wait for, but for torch's allocator and the driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from benchmarks.runner.run import Comparison, Measurement, NotMeasuredError, Run
from transformer_kernels.backends.native import cuda_support
from transformer_kernels.bench import VARIANTS, Attend, Case, Direction, Row, prepare_work
from transformer_kernels.bench.contenders import Contender, check
from transformer_kernels.bench.variants import ours
from transformer_kernels.masks.mask import Mask

DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")
CAUSAL = Case(name="8 heads, 64 tokens", M=64, N=64, mask=Mask.causal(), mask_name="causal")
PADDED = replace(
    CAUSAL, B=2, mask=Mask.padding(torch.tensor([64, 40])) & Mask.causal(), mask_name="padding"
)
SHORTEST = Case(name="1 head, 4 tokens", H_q=1, H_kv=1, M=4, N=4, D=16, D_v=16)
"""A call whose CPU kernel takes hardly any time."""


def comparisons() -> Iterator[Comparison]:
    yield Comparison(name="CPU kernels", measurements=cpu)
    yield Comparison(name="CUDA kernels", measurements=cuda)


def cpu(run: Run) -> Iterator[Measurement]:
    checked = check(SHORTEST, [VARIANTS[name] for name in ("naive", "sdpa", "cpu")])
    for direction in DIRECTIONS:
        yield run.timed([*checked.contenders(direction), _empty_function(direction)])


def cuda(run: Run) -> Iterator[Measurement]:
    """Plain calls, and the same by the operators alone."""
    from tests.support import emulator

    if (reason := emulator.unavailable_reason()) is not None:
        raise NotMeasuredError(reason)
    emulator.install()
    library = cuda_support.libraries["cpu"]
    calls = {"direct": library.direct, "operators": None}
    for case, direction in product((CAUSAL, PADDED), DIRECTIONS):
        inputs = case.inputs()
        contenders = [
            Contender(
                case, direction, f"cuda: {name}",
                prepare_work(_attend(case, library, direct), inputs, direction), math.nan,
            )
            for name, direct in calls.items()
        ]  # fmt: skip
        timed = run.timed([*contenders, _empty_function(direction)])

        def measure(suite: str, timed: Measurement = timed) -> list[Row]:
            try:
                with emulator.without_kernels():
                    return timed(suite)
            finally:
                library.direct = calls["direct"]

        yield measure


def _attend(
    case: Case, library: cuda_support.Library, direct: cuda_support.DirectCalls | None
) -> Attend:
    attend = ours("cuda")(case)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        library.direct = direct
        return attend(q, k, v)

    return call


class _Empty(torch.autograd.Function):
    """A function of q, k and v that computes nothing."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: object, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return do, do, do


def _empty_function(direction: Direction) -> Contender:
    """The least that a differentiable function in Python takes."""
    prepare = prepare_work(_Empty.apply, SHORTEST.inputs(), direction)
    return Contender(SHORTEST, direction, "empty function", prepare, math.nan)
