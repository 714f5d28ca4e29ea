"""The switch `context_parallel`: models on divided sequences, against undivided ones."""

from __future__ import annotations

import pytest

from tests.integrations.huggingface.tiny_models import transformers
from tests.support.processes import assert_runs

MODELS = "tests.distributed.context_checks"
HUGGINGFACE = "tests.distributed.huggingface_checks"


def test_models_modules_and_wrappers_of_torch() -> None:
    assert_runs(2, f"{MODELS}:check_everything")


@pytest.mark.exhaustive
def test_a_grid_of_processes() -> None:
    assert_runs(4, f"{MODELS}:check_mesh")


@pytest.mark.exhaustive
def test_huggingface_models() -> None:
    transformers()
    assert_runs(2, f"{HUGGINGFACE}:check_everything")
