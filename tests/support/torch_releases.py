"""Marks of tests that need more than the oldest supported torch has."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.common import torch_private

needs_varlen = pytest.mark.skipif(
    bool(torch_private.MISSING_FOR_VARLEN),
    reason=f"torch {torch.__version__} lacks {', '.join(torch_private.MISSING_FOR_VARLEN)}",
)
not_in_2_11 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 cannot do this, without us either"
)
