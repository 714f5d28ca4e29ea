"""The shared table of varlen cases on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.support.varlen_cases import VARLEN_CASES, VarlenCase, assert_varlen_case

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_case(case: VarlenCase, dtype: torch.dtype, backend: str) -> None:
    assert_varlen_case(case, dtype, backend, "cuda")
