"""Divided attention, documents, models and DTensors in several processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed import checks, context_checks, divided, documents, dtensor_checks
from tests.integrations.huggingface.tiny_models import transformers
from tests.support.processes import assert_runs, run_processes
from transformer_kernels.distributed import (
    ring_attention,
    ring_attention_varlen,
    shard_documents,
    shard_sequence,
)

FOLDER = "tests.distributed"


def check_sample() -> None:
    """A part of every file of checks."""
    divided.check_cases("zigzag", "1", "float64", "auto", "3", "22")
    divided.check_cases("contiguous", "2", "float64", "auto", "5", "22")
    documents.check_sample()
    context_checks.check_switch()
    dtensor_checks.check_sample()
    checks.check_errors()
    checks.check_disagreement()
    checks.check_messages()


@pytest.mark.quick
def test_a_sample_of_all_checks() -> None:
    """One launch for `make test`: documents, the switch and errors included."""
    assert_runs(2, f"{FOLDER}.test_processes:check_sample")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "check"),
    [
        (2, "checks:check_others"),
        (3, "checks:check_messages"),
        (4, "checks:check_messages"),
        (2, "context_checks:check_everything"),
        (4, "context_checks:check_mesh"),
        (2, "documents:check_everything"),
        (3, "documents:check_more_processes"),
        (4, "documents:check_more_processes"),
        (4, "dtensor_checks:check_mesh"),
        (2, "huggingface_checks:check_everything"),
    ],
)
def test_checks(count: int, check: str) -> None:
    if check.startswith("huggingface"):
        transformers()
    assert_runs(count, f"{FOLDER}.{check}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "layout", "heads", "dtype", "backend", "first", "step"),
    [
        (3, "zigzag", 1, "float64", "auto", 0, 1),
        (4, "zigzag", 2, "float64", "auto", 0, 1),
        (2, "zigzag", 1, "float64", "auto", 0, 3),
        (2, "contiguous", 1, "float64", "auto", 1, 3),
        (2, "contiguous", 2, "float64", "auto", 0, 2),
        (2, "zigzag", 2, "float64", "auto", 1, 4),
        (4, "contiguous", 1, "float64", "auto", 2, 4),
        (2, "zigzag", 1, "float32", "auto", 0, 3),
        (2, "zigzag", 1, "bfloat16", "auto", 1, 3),
        (2, "zigzag", 1, "float16", "auto", 2, 3),
        (2, "zigzag", 1, "float64", "reference", 1, 3),
    ],
)
def test_cases_equal_the_undivided_call(
    count: int, layout: str, heads: int, dtype: str, backend: str, first: int, step: int
) -> None:
    """Every `step`-th case of the table of attention cases."""
    words = layout, heads, dtype, backend, first, step
    assert_runs(count, f"{FOLDER}.divided:check_cases", *words)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, 1], ids=["in-the-call", "before-the-call"])
def test_a_rank_that_ends_is_named(first: int) -> None:
    done = run_processes(2, f"{FOLDER}.checks:check_one_rank_ends", first)
    assert "rank 0 has named rank 1" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_named_in_time() -> None:
    done = run_processes(2, f"{FOLDER}.checks:check_one_rank_hangs", 4, timeout=4)
    assert done.returncode == 0, done.stderr


def test_processes_must_be_started_first() -> None:
    q, rows, cu_seqlens = torch.zeros(1, 1, 4, 8), torch.zeros(4, 1, 8), torch.tensor([0, 4])
    calls: tuple[Callable[[], object], ...] = (
        lambda: ring_attention(q, q, q),
        lambda: shard_sequence(q, dim=2),
        lambda: ring_attention_varlen(rows, rows, rows, cu_seqlens),
        lambda: shard_documents(rows, cu_seqlens),
    )
    for call in calls:
        with pytest.raises(ValueError, match="is not initialized: start the processes"):
            call()
