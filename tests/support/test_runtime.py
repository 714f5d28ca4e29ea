"""`poisoned_memory` covers allocations of Python and of the compiled operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import deterministic

import transformer_kernels as tk
from tests.support.runtime import poisoned_memory
from transformer_kernels import _C


def test_fresh_memory_is_nan() -> None:
    with poisoned_memory():
        x = torch.zeros(3)
        for fresh in (torch.empty(5), torch.empty_like(x), x.new_empty(2, 2)):
            assert fresh.isnan().all()
        assert (torch.empty(4, dtype=torch.uint8) == 255).all()


def test_earlier_settings_are_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with poisoned_memory():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def poisoned_by(call: Callable[[], object]) -> int:
    before = _C.poisoned_bytes()
    call()
    return _C.poisoned_bytes() - before


def test_workspaces_are_poisoned_in_every_call() -> None:
    """Although the workspace is reused from call to call."""
    q = torch.randn(1, 2, 67, 16)
    assert poisoned_by(lambda: tk.attention(q, q, q)) == 0
    with poisoned_memory():
        first, second = (poisoned_by(lambda: tk.attention(q, q, q)) for _ in range(2))
    assert first == second > q.nbytes
    assert poisoned_by(lambda: tk.attention(q, q, q)) == 0


def test_outputs_of_the_operators_are_poisoned() -> None:
    q, k, v = (torch.randn(1, 2, 67, 16, requires_grad=True) for _ in range(3))

    def direct() -> None:  # here Python allocates the outputs, and torch poisons them
        torch.autograd.grad(tk.attention(q, k, v).sum(), (q, k, v))

    def by_operators() -> None:
        o, lse = tk.attention(q, k, v, return_lse=True)
        torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))

    with poisoned_memory():
        workspaces = poisoned_by(direct)
        everything = poisoned_by(by_operators)
    row_stats = 2 * 4 * 2 * 67
    assert everything - workspaces == 4 * q.nbytes + row_stats
