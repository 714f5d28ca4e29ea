"""Memory that is not aligned to its elements: an error for every tensor argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import assert_declined_if_changed, operator_arguments
from tests.support.storage import misaligned
from transformer_kernels.backends.native import extension
from transformer_kernels.integrations.torch_sdpa import ArgumentValueError
from transformer_kernels.masks.resolved import ResolvedMask
from transformer_kernels.problem import Layout
from transformer_kernels.scores.options import PLAIN_SCORES

B, H, N, D = 1, 2, 70, 16
MESSAGE = "has elements of . bytes, but its memory starts at 0x"


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)


LENGTHS = misaligned(torch.tensor([9]))
IDS = misaligned(torch.zeros(B, N, dtype=torch.int32))
ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "q": lambda: {"q": misaligned(qkv()[0])},
    "k": lambda: {"k": misaligned(qkv()[1])},
    "v": lambda: {"v": misaligned(qkv()[2])},
    "bias": lambda: {"bias": misaligned(torch.zeros(N, N))},
    "slopes": lambda: {"bias": tk.alibi(misaligned(torch.ones(H)))},
    "the table of relative": lambda: {
        "relative": tk.relative_bias(misaligned(torch.ones(H, 3)), lowest=0)
    },
    "the keys of relative": lambda: {
        "relative": tk.relative_keys(misaligned(torch.ones(H, 3, D)), lowest=0)
    },
    "sinks": lambda: {"sinks": misaligned(torch.ones(H))},
    "seed": lambda: {"seed": misaligned(torch.tensor(1)), "dropout_p": 0.5},
    "KeyRange.end": lambda: {"mask": tk.Mask.padding(LENGTHS)},
    "KeyRange.start": lambda: {"mask": tk.Mask.key_range(LENGTHS, torch.tensor([70]))},
    "Positions.k_pos": lambda: {"mask": tk.Mask.positions(IDS.clone(), IDS)},
    "Segments.q_ids": lambda: {"mask": tk.Mask.segments(IDS, IDS.clone())},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_attention(name: str, backend: str) -> None:
    given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True)) | ARGUMENTS[name]()
    with pytest.raises(ValueError, match=f"{'bias' if name == 'slopes' else name} {MESSAGE}"):
        tk.attention(**given, backend=backend)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_drop_in(name: str) -> None:
    query, key, value = qkv()
    attn_mask = torch.zeros(N, N)
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    given[name] = misaligned(given[name])
    with pytest.raises(ArgumentValueError, match=f"{name} {MESSAGE}"):
        tk.scaled_dot_product_attention(**given)


def test_decode() -> None:
    q, cache = torch.randn(1, H, 1, D), torch.randn(1, H, 16, D)
    with pytest.raises(ValueError, match=f"k_cache {MESSAGE}"):
        tk.attention_decode(q, misaligned(cache), cache, torch.tensor([9]))
    with pytest.raises(ValueError, match=f"cache_seqlens {MESSAGE}"):
        tk.attention_decode(q, cache, cache, LENGTHS)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_operators(name: str, backend: str) -> None:
    arguments = operator_arguments(*qkv())
    arguments[name] = misaligned(arguments[name])
    with pytest.raises(RuntimeError, match="not aligned to its elements"):
        operators_of(backend).attention_forward(**arguments)


def test_direct_calls_decline() -> None:
    q, k, v = qkv()
    first = q[:, :, :1]
    layout = Layout(cache_seqlens=torch.tensor([9]), block_table=torch.tensor([[0]]))
    options = PLAIN_SCORES, ResolvedMask(bottom_right=True), layout
    arguments = [first, k, v, *options, None, True, first.clone(), None, True]
    assert_declined_if_changed(extension.compiled.direct_forward, arguments, misaligned)
