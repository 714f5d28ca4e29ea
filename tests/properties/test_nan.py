"""NaN and infinity. In keys and values that no query sees, and in queries that see no key, they
change no result. Visible ones propagate, within their sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DECODERS, TABLE_WAYS
from tests.support.cases import HIDDEN_CASES, Case, assert_hidden_nan_changes_nothing
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


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoding_without_a_visible_key(decoder: str) -> None:
    q, cache = torch.full((2, 4, 3, 8), math.nan), torch.full((2, 2, 70, 8), math.nan)
    mask = tk.Mask.window(-2, 1, align="bottom_right")
    o, lse = tk.attention_decode(
        q, cache, cache, torch.tensor([70, 5]), mask=mask, return_lse=True, backend=decoder
    )
    assert not o.any()
    assert (lse == -math.inf).all()


def visible_nan(where: str) -> tuple[Tensor, Tensor, Tensor]:
    tensors = {name: torch.randn(1, 1, 70, 8) for name in "qkv"}
    tensors[where][0, 0, 66, 3] = float("nan")
    return tensors["q"], tensors["k"], tensors["v"]


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_visible_nan_propagates(where: str, backend: str) -> None:
    """Rows with a visible NaN are NaN, as in plain torch."""
    o, lse = tk.attention(*visible_nan(where), return_lse=True, backend=backend)
    hit = o.isnan().any(dim=-1)[0, 0]
    assert hit.tolist() == [where != "q" or i == 66 for i in range(70)]
    assert torch.equal(lse.isnan()[0, 0], hit & (where != "v"))


def test_overflowing_scores_propagate(backend: str) -> None:
    q = torch.full((1, 1, 3, 8), 1e20)
    k = torch.cat([q, torch.zeros(1, 1, 67, 8)], dim=2)
    o, lse = tk.attention(q, k, torch.randn(1, 1, 70, 8), return_lse=True, backend=backend)
    assert o.isnan().all()
    assert not lse.isfinite().any()


@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_packed_sequences_are_independent(value: float, where: int, backend: str) -> None:
    q, k, v = (torch.randn(108, 2, 16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 5, 5, 75, 108])
    clean = tk.attention_varlen(q, k, v, starts, backend=backend)
    with torch.no_grad():
        (q, k, v)[where][80] = value
    o = tk.attention_varlen(q, k, v, starts, backend=backend)
    assert not torch.equal(o[75:], clean[75:])
    assert torch.equal(o[:75], clean[:75])
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(grad[:75].isfinite().all() for grad in grads)


@pytest.mark.parametrize("where", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("decoder", DECODERS)
def test_cached_sequences_are_independent(decoder: str, value: float, where: int) -> None:
    q, k, v = torch.randn(3, 4, 2, 16), torch.randn(9, 2, 16, 16), torch.randn(9, 2, 16, 16)
    lengths, table = torch.tensor([40, 1, 16]), torch.tensor([[7, 0, 3], [2, 9, 9], [5, -1, -1]])
    clean = tk.attention_decode(q, k, v, lengths, table, backend=decoder)
    (k, v)[where][3, :, 3] = value
    o = tk.attention_decode(q, k, v, lengths, table, backend=decoder)
    assert not torch.equal(o[0], clean[0])
    assert torch.equal(o[1:], clean[1:])
