"""The contract of the operator on a CUDA device: the shared table of cases."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.testing.cases import CASES, Case
from transformer_kernels.testing.results import assert_case

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype) -> None:
    assert_case(case, dtype, "triton", "cuda")
