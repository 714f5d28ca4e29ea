"""Ceilings: workloads with as much work as a case, at the rate that the machine is capable of.

They run in the rounds of the case, so that the ratio of times is the share of the ceiling that an
implementation reaches, also on a machine whose speed changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from transformer_kernels.bench import Case, Direction
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.provenance import device_slug
from transformer_kernels.bench.workload import Workload

GEMM, SUM = "gemm", "sum"
"""Names of the variants."""


def gemm(case: Case, direction: Direction) -> Contender:
    """A product of square matrices with as many operations as the case's matrix products."""
    side = round((case.operations(direction) / 2) ** (1 / 3))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(side, side, generator=generator).to(case.dtype) for _ in range(2))
    return _contender(case, direction, GEMM, partial(torch.mm, x, y))


def reading(case: Case, keys_and_values: Tensor) -> Contender:
    """A sum over the keys and values of a forward pass, which is limited by bandwidth.

    torch vectorizes and threads sums of float32. Those of int32 or of half precision are slower.

    Args:
        case: the case.
        keys_and_values: as many elements as its keys and values have, contiguous.
    """
    return _contender(case, "fwd", SUM, keys_and_values.flatten().view(torch.float32).sum)


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch's products in this dtype are fast on this CPU. Without AMX, those in half
    precision are many times slower than attention."""
    return dtype == torch.float32 or device_slug().endswith("-amx")


def products(case: Case, direction: Direction) -> Sequence[Contender]:
    """The product of a case, in a dtype in which products are fast."""
    return [gemm(case, direction)] if has_fast_products(case.dtype) else []


def ceilings(case: Case, direction: Direction) -> Sequence[Contender]:
    """The ceiling of a case on a CPU. A step of decoding with gradients has none."""
    if case.M > 1:
        return products(case, direction)
    return [reading(case, torch.stack(case.inputs()[1:3]))] if direction == "fwd" else []


def _contender(case: Case, direction: Direction, variant: str, workload: Workload) -> Contender:
    return Contender(case, direction, variant, lambda: workload, math.nan)
