from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Device of the Triton kernels: a GPU, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
