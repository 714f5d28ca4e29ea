from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.runner import ceilings as runner
from benchmarks.runner.ceilings import GEMM, SUM, ceilings, gemm, products, reading
from transformer_kernels.bench import Case, Direction
from transformer_kernels.masks.mask import Mask

CASE = Case(name="", B=2, H_q=4, H_kv=2, M=96, N=80, D=32, D_v=48)


@pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("mask", [None, Mask.window(20, 0)])
def test_the_product_has_as_many_operations_as_the_case(
    direction: Direction, mask: Mask | None
) -> None:
    case = replace(CASE, mask=mask)
    contender = gemm(case, direction)
    with FlopCounterMode(display=False) as counter:
        contender.prepare()()
    assert counter.get_total_flops() == pytest.approx(case.operations(direction), rel=0.02)
    assert (contender.variant, contender.direction, contender.case) == (GEMM, direction, case)
    assert math.isnan(contender.error)


@pytest.mark.parametrize(("device", "expected"), [("epyc-avx512", []), ("xeon-amx", [GEMM])])
def test_products_in_half_precision_need_amx(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "device_slug", lambda: device)
    half = replace(CASE, dtype=torch.bfloat16)
    assert [one.variant for one in products(half, "fwd")] == expected
    assert [one.variant for one in products(CASE, "fwd")] == [GEMM]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_reads_every_byte_of_keys_and_values(dtype: torch.dtype) -> None:
    case = Case(name="", M=1, N=6, D=8, D_v=8, dtype=dtype)
    keys_and_values = torch.stack(case.inputs()[1:3])
    contender = reading(case, keys_and_values)
    got = contender.prepare()()
    assert isinstance(got, Tensor)
    words = keys_and_values.view(torch.uint8).numpy().view("float32")
    torch.testing.assert_close(got, torch.from_numpy(words).sum(), equal_nan=True)
    assert contender.variant == SUM


def test_a_step_of_decoding_is_limited_by_bandwidth() -> None:
    case = Case(name="", M=1, N=6)
    assert [one.variant for one in ceilings(case, "fwd")] == [SUM]
    assert ceilings(case, "fwd+bwd") == []
    assert [one.variant for one in ceilings(CASE, "fwd+bwd")] == [GEMM]
