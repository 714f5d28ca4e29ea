"""Operators called directly check the size of a relative bias, which kernels read by distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import operator_arguments

H, M, N, D = 2, 5, 9, 4
STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)
KEY_STARTS = torch.tensor([0, 2, 9], dtype=torch.int32)
LENGTHS = torch.tensor([N], dtype=torch.int32)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, H, M, D), torch.randn(1, H, N, D), torch.randn(1, H, N, D)


def packed(**given: Any) -> dict[str, Any]:
    return {"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS, **given}


REFUSED: dict[str, dict[str, Any]] = {
    "short": {"relative_bias": torch.ones(H, M + N - 2)},
    "long": {"relative_bias": torch.ones(1, M + N)},
    "heads": {"relative_bias": torch.ones(3, M + N - 1)},
    "1d": {"relative_bias": torch.ones(M + N - 1)},
    "half": {"relative_bias": torch.ones(H, M + N - 1).half()},
    "double": {"relative_bias": torch.ones(H, M + N - 1).double()},
    "cache": {"relative_bias": torch.ones(H, M + N), "cache_seqlens": LENGTHS},
    "packed": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_q=3, max_seqlen_k=7),
    "packed-huge": packed(relative_bias=torch.ones(H, M + N - 1), max_seqlen_k=(1 << 63) - 1),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_other_sizes_are_refused(name: str, backend: str) -> None:
    arguments = operator_arguments(*qkv(), **REFUSED[name])
    with pytest.raises(
        RuntimeError, match=r"relative_bias must be \(1\|H_q, distances\), in float"
    ):
        operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize("longest", [{"max_seqlen_q": 2}, {"max_seqlen_k": 6}], ids=str)
def test_sequences_beyond_their_bounds_are_refused(longest: dict[str, int]) -> None:
    """On the CPU, where reading the lengths does not wait for a device."""
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 7} | longest
    table = torch.ones(H, sum(bounds.values()) - 1)
    arguments = operator_arguments(*qkv(), **packed(relative_bias=table, **bounds))
    with pytest.raises(RuntimeError, match="no sequence may be longer than max_seqlen_q and"):
        torch.ops.transformer_kernels.attention_forward(**arguments)


def test_a_gradient_needs_a_table() -> None:
    q, k, v, *options = operator_arguments(*qkv()).values()
    o, lse, block_mask = torch.ops.transformer_kernels.attention_forward(q, k, v, *options)
    saved = (o, None, q, k, v, o, lse, block_mask)
    with pytest.raises(RuntimeError, match="relative_bias_needs_grad requires relative_bias"):
        torch.ops.transformer_kernels.attention_backward(*saved, *options, False, True, False)
