"""Errors, agreement and failure of ranks, order and content of messages."""

from __future__ import annotations

import pytest
import torch

from tests.support.processes import assert_runs, run_processes
from transformer_kernels.distributed import ring_attention, shard_sequence

HERE = "tests.distributed.checks"


def test_errors_agreement_and_messages() -> None:
    assert_runs(2, f"{HERE}:check_everything")


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [3, 4])
def test_messages_of_more_processes(count: int) -> None:
    assert_runs(count, f"{HERE}:check_messages")


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, 1], ids=["in-the-call", "before-the-call"])
def test_a_rank_that_ends_is_named(first: int) -> None:
    done = run_processes(2, f"{HERE}:check_one_rank_ends", first)
    assert "rank 0 has named rank 1" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_named_in_time() -> None:
    done = run_processes(2, f"{HERE}:check_one_rank_hangs", 4, timeout=4)
    assert done.returncode == 0, done.stderr


def test_processes_must_be_started_first() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="is not initialized: start the processes"):
        ring_attention(q, q, q)
    with pytest.raises(ValueError, match="is not initialized: start the processes"):
        shard_sequence(q, dim=2)
