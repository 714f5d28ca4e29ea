"""`flash_attn_func` and its packed forms against their documentation, in plain torch."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.integrations.flash_attn.plain import OPTIONS, PACKED_OPTIONS, assert_agrees, attend
from tests.support.operators import FORWARD, operators_run_by
from tests.support.tiers import each
from transformer_kernels.integrations import flash_attn
from transformer_kernels.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

HALVES_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
"""The signatures in flash_attn 2.8.4, without types."""
WITH_SINKS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
"""Functions that take the sinks of flash_attn 3 too."""


def drawn(dtype: torch.dtype, M: int = 35, N: int = 67, H_kv: int = 2) -> tuple[Tensor, ...]:
    return (
        torch.randn(3, M, 4, 24, dtype=dtype),
        torch.randn(3, N, H_kv, 24, dtype=dtype),
        torch.randn(3, N, H_kv, 24, dtype=dtype),
    )


def test_signatures() -> None:
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        written = ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
        assert written == expected + (", s_aux=None" if name in WITH_SINKS else "")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    """With more queries than keys, causal masks hide every key from some queries."""

    def expected(*tensors: Tensor) -> Tensor:
        return attend(*tensors, **options)[0]

    for M, N in ((35, 67), (67, 35)):
        assert_agrees(partial(flash_attn_func, **options), expected, drawn(dtype, M, N))


@each("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_packed_forms(options: dict[str, Any]) -> None:
    q, k, v = drawn(torch.float32, 35, 35, 4)
    o = flash_attn_func(q, k, v, **options)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options), o)
    qkv = torch.stack([q, k, v], dim=2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **options), o)

    def expected(qkv: Tensor) -> Tensor:
        return attend(*qkv.unbind(2), **options)[0]

    assert_agrees(partial(flash_attn_qkvpacked_func, **options), expected, (qkv,))


def test_positional_arguments() -> None:
    """In the order of flash_attn: dropout, scale, causal, window, softcap, slopes."""
    q, k, v = drawn(torch.float32)
    slopes = torch.rand(4)
    o = flash_attn_func(q, k, v, 0.0, 0.2, True, (9, -1), 2.0, slopes, True)
    options: dict[str, Any] = {"softmax_scale": 0.2, "window_size": (9, -1), "softcap": 2.0}
    assert torch.equal(o, flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, **options))
    options["window_size"] = torch.tensor([9, -1])
    assert torch.equal(o, flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, **options))
    kv = torch.stack([k, v], dim=2)
    same = flash_attn_kvpacked_func(q, kv, 0.0, 0.2, True, (9, -1), 2.0, slopes, True)
    assert torch.equal(same, o)


def test_dropout_follows_the_generator() -> None:
    q, k, v = drawn(torch.float32)
    torch.manual_seed(3)
    o = flash_attn_func(q, k, v, 0.4)
    torch.manual_seed(3)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(o.transpose(1, 2), tk.attention(*heads_first, dropout_p=0.4))
    assert not torch.equal(o, flash_attn_func(q, k, v, 0.4))


def test_nothing_is_copied() -> None:
    """Slices of qkv are read in place, and the output is contiguous."""
    qkv = torch.randn(2, 9, 3, 4, 16)
    ran = operators_run_by(lambda: flash_attn_qkvpacked_func(qkv))
    assert ran[FORWARD] == 1
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & ran.keys()
    assert flash_attn_qkvpacked_func(qkv).is_contiguous()


def test_compiled_training() -> None:
    tensors = drawn(torch.float32)
    options = OPTIONS["alibi-by-entry"] | {"causal": True}
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)

    def expected(*tensors: Tensor) -> Tensor:
        return attend(*tensors, **options)[0]

    assert_agrees(partial(compiled, **options), expected, tensors)


X = torch.randn(2, 5, 4, 8)
INVALID: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "return_attn_probs must be False.*return_lse": ({"return_attn_probs": True}, ValueError),
    r"q must be \(batch, seqlen, heads, headdim\), got shape \(5, 4, 8\)": (
        {"q": X[0]},
        ValueError,
    ),
    "v must be a floating-point tensor, got list": ({"v": [0.0]}, TypeError),
    "window_size must be a pair of ints, got 3": ({"window_size": 3}, TypeError),
    r"window_size must be a pair of ints, got \(1, 2, 3\)": (
        {"window_size": (1, 2, 3)},
        TypeError,
    ),
    "window_size must be a pair of ints, got None": ({"window_size": (None, 0)}, TypeError),
    r"ALiBi slopes must be \(H_q,\) = \(4,\) or \(B, H_q\) = \(2, 4\)": (
        {"alibi_slopes": torch.ones(3, 4)},
        ValueError,
    ),
    r"ALiBi slopes \(B, H_q\) must not require grad": (
        {"alibi_slopes": torch.ones(2, 4, requires_grad=True)},
        ValueError,
    ),
    "dropout_p must be between 0 and 1": ({"dropout_p": -0.1}, ValueError),
    "k and v must share heads and length": ({"v": X[:, :4]}, ValueError),
}


@each("message", INVALID)
def test_invalid_arguments(message: str) -> None:
    wrong, error = INVALID[message]
    flash_attn_func(X, X, X)
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": X, "k": X, "v": X} | wrong)


def test_invalid_packed_tensors() -> None:
    with pytest.raises(ValueError, match=r"kv must be \(batch, seqlen, 2, heads_k, headdim\)"):
        flash_attn_kvpacked_func(X, torch.randn(2, 5, 3, 4, 8))
    with pytest.raises(ValueError, match=r"qkv must be \(batch, seqlen, 3, heads, headdim\)"):
        flash_attn_qkvpacked_func(X)
