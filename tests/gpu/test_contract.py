"""The shared table of attention cases on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import CASES, Case
from tests.support.evaluate import assert_case, reasons_against
from tests.support.hidden_cases import HIDDEN_CASES, assert_hidden_nan_changes_nothing

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    assert_case(case, dtype, backend, "cuda")


@pytest.mark.usefixtures("poisoned", "deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", HIDDEN_CASES, ids=str)
def test_hidden_nan_changes_nothing(case: Case, dtype: torch.dtype, backend: str) -> None:
    assert_hidden_nan_changes_nothing(case, dtype, backend, "cuda")


def test_only_wide_heads_are_unsupported(backend: str) -> None:
    for case in CASES:
        too_wide = backend == "cuda" and max(case.D, case.D_v) > 256
        assert len(reasons_against(case, backend, "cuda")) == too_wide, case.name
