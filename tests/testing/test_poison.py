"""The poison reaches what Python allocates, and what the compiled operators allocate."""

from __future__ import annotations

import torch
from torch.utils import deterministic

import transformer_kernels as tk
from transformer_kernels.testing.operators import BACKWARD, FORWARD, operators_run_by
from transformer_kernels.testing.poison import poisoned_memory


def test_fresh_memory_is_nan() -> None:
    with poisoned_memory():
        x = torch.zeros(3)
        for fresh in (torch.empty(5), torch.empty_like(x), x.new_empty(2, 2)):
            assert fresh.isnan().all()
        assert (torch.empty(4, dtype=torch.uint8) == 255).all()


def test_what_was_set_comes_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with poisoned_memory():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_compiled_operators_are_given_poisoned_memory() -> None:
    """Torch fills every `aten::empty` of theirs: outputs, workspaces and the block summary."""
    q = torch.randn(1, 2, 67, 16, requires_grad=True)
    mask = tk.Mask.dense(torch.rand(67, 67) < 0.5)

    def step() -> None:
        torch.autograd.grad(tk.attention(q, q, q, mask=mask, backend="cpu").sum(), q)

    step()
    plain = operators_run_by(step)
    with poisoned_memory():
        poisoned = operators_run_by(step)
    assert (plain[FORWARD], plain[BACKWARD]) == (1, 1)
    # o, lse, summary and workspace forward; dq, dk, dv and workspace backward.
    assert poisoned["aten::fill_"] - plain["aten::fill_"] >= 8
    assert poisoned["aten::empty"] == plain["aten::empty"] >= 8
