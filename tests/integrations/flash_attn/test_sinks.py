"""Gradients of the sinks, `s_aux`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.integrations.flash_attn.plain import OPTIONS, assert_agrees, attend
from tests.integrations.flash_attn.test_dense import drawn
from tests.integrations.flash_attn.test_varlen import (
    LENGTHS_K,
    LENGTHS_Q,
    by_sequence,
    in_pages,
    packed,
    starts,
)
from transformer_kernels.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

SINKS = OPTIONS["sinks"]["s_aux"]
OFFSETS = starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)


@pytest.mark.usefixtures("poisoned")
def test_dense() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, s_aux=s_aux)

    def expected(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        return attend(q, k, v, causal=True, s_aux=s_aux)[0]

    assert_agrees(call, expected, (*drawn(torch.float32), SINKS))


@pytest.mark.usefixtures("poisoned")
def test_packed() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, *OFFSETS, causal=True, s_aux=s_aux)

    def expected(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor) -> Tensor:
        return by_sequence(q, k, v, causal=True, s_aux=s_aux)

    assert_agrees(call, expected, (*packed(torch.float32, LENGTHS_Q, LENGTHS_K), SINKS))


@pytest.mark.parametrize("lengths_q", [(4, 4, 4), LENGTHS_Q], ids=["even", "uneven"])
def test_pages(lengths_q: tuple[int, ...]) -> None:
    """Pages that could be read in place are copied if the sinks alone require a gradient."""
    q, k, v = packed(torch.float32, lengths_q, LENGTHS_K)
    table = torch.randperm(9).view(3, 3).int()
    k_pages, v_pages = (in_pages(x, LENGTHS_K, 16, table) for x in (k, v))
    offsets = starts(lengths_q), starts(LENGTHS_K), max(lengths_q), max(LENGTHS_K)

    def call(s_aux: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k_pages, v_pages, *offsets, block_table=table, s_aux=s_aux)

    def expected(s_aux: Tensor) -> Tensor:
        q_, k_, v_ = (x.to(s_aux.dtype) for x in (q, k, v))
        return by_sequence(q_, k_, v_, lengths_q, s_aux=s_aux)

    assert_agrees(call, expected, (SINKS,))
