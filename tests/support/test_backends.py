"""The backends that the shared tests run."""

from __future__ import annotations

import torch

from tests.support.backends import NAMES
from tests.support.emulated import NOT_EMULATED


def test_every_backend_that_runs_on_cpu_tensors_is_tested() -> None:
    expected = {"cpu", "reference"}
    if NOT_EMULATED is None:
        expected |= {"cuda"}
    if not torch.cuda.is_available():
        expected |= {"triton"}
    assert set(NAMES) == expected
