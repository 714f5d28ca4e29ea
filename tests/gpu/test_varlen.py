"""Packed sequences on a CUDA device: the shared table of cases."""

from __future__ import annotations

import pytest
import torch

from tests.support.varlen_cases import PACKED_CASES, PackedCase, assert_packed_case

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_case(case: PackedCase, dtype: torch.dtype, backend: str) -> None:
    assert_packed_case(case, dtype, backend, "cuda")
