"""The contract of the operator on a CUDA device: the shared table of cases."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import CASES, Case
from tests.support.evaluate import assert_case, reasons_against

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    if reasons := reasons_against(case, backend, "cuda"):
        pytest.skip("; ".join(reasons))
    assert_case(case, dtype, backend, "cuda")


def test_every_case_is_taken(backend: str) -> None:
    """But for widths, which are all that a case may be skipped for."""
    for case in CASES:
        too_wide = backend == "cuda" and max(case.D, case.D_v) > 256
        assert len(reasons_against(case, backend, "cuda")) == too_wide, case.name
