"""NaN in keys and values that no query sees, and in queries that see no key: no result changes."""

from __future__ import annotations

import math

import pytest
import torch

import transformer_kernels as tk
from tests.support.backends import DECODING, TABLE_WAYS
from tests.support.cases import Case
from tests.support.hidden_cases import HIDDEN_CASES, assert_hidden_nan_changes_nothing
from tests.support.tiers import crossed


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), crossed(HIDDEN_CASES, TABLE_WAYS))
def test_hidden_nan_changes_nothing(
    case: Case, backend: str, dtype: torch.dtype, device: torch.device
) -> None:
    assert_hidden_nan_changes_nothing(case, dtype, backend, device)


def test_segments_and_causal_hide_a_key_together(backend: str) -> None:
    """Key 1 is in segment 7, of which only query 0 is part, before the key."""
    ids = torch.tensor([[7, 3, 3, 3]]), torch.tensor([[7, 7, 3, 3]])
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    k[:, :, 1] = v[:, :, 1] = math.nan
    x = [one.requires_grad_() for one in (q, k, v)]
    o = tk.attention(*x, mask=tk.Mask.causal() & tk.Mask.segments(*ids), backend=backend)
    grads = torch.autograd.grad(o.sum(), x)
    assert all(one.isfinite().all() for one in (o, *grads))
    assert not grads[1][:, :, 1].any()
    assert not grads[2][:, :, 1].any()


def test_packed_sequences_without_a_visible_key(backend: str) -> None:
    q, k, v = (torch.full((40, 2, 8), math.nan, requires_grad=True) for _ in range(3))
    mask = tk.Mask.window(-2, 1, align="bottom_right")
    starts = torch.tensor([0, 7, 40])
    o, lse = tk.attention_varlen(q, k, v, starts, mask=mask, return_lse=True, backend=backend)
    assert not o.any()
    assert (lse == -math.inf).all()
    assert not any(grad.any() for grad in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize("decoder", DECODING)
def test_decoding_without_a_visible_key(decoder: str) -> None:
    q, cache = torch.full((2, 4, 3, 8), math.nan), torch.full((2, 2, 70, 8), math.nan)
    mask = tk.Mask.window(-2, 1, align="bottom_right")
    o, lse = tk.attention_decode(
        q, cache, cache, torch.tensor([70, 5]), mask=mask, return_lse=True, backend=decoder
    )
    assert not o.any()
    assert (lse == -math.inf).all()
