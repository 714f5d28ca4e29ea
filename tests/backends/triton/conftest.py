from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where Triton's kernels run here: on a GPU, or interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
