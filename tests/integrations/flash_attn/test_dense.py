"""`flash_attn_func` and its packed forms against their documentation, and `bert_padding`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

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
from transformer_kernels.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
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


def output_of_attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attend(q, k, v, **options)[0]


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
    for M, N in ((35, 67), (67, 35)):
        assert_agrees(flash_attn_func, output_of_attend, drawn(dtype, M, N), **options)


@each("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_packed_forms(options: dict[str, Any]) -> None:
    q, k, v = drawn(torch.float32, 35, 35, 4)
    o = flash_attn_func(q, k, v, **options)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options), o)
    qkv = torch.stack([q, k, v], dim=2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **options), o)

    def expected(qkv: Tensor, **options: Any) -> Tensor:
        return attend(*qkv.unbind(2), **options)[0]

    assert_agrees(flash_attn_qkvpacked_func, expected, (qkv,), **options)


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
    options = OPTIONS["alibi-by-entry"] | {"causal": True}
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    assert_agrees(compiled, output_of_attend, drawn(torch.float32), **options)


X = torch.randn(2, 5, 4, 8)
INVALID: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
    (ValueError, r"q must be \(batch, seqlen, heads, headdim\), got shape \(5, 4, 8\)",
     {"q": X[0]}),
    (TypeError, "v must be a floating-point tensor, got list", {"v": [0.0]}),
    (TypeError, "window_size must be a pair of ints, got 3", {"window_size": 3}),
    (TypeError, r"must be a pair of ints, got \(1, 2, 3\)", {"window_size": (1, 2, 3)}),
    (TypeError, "window_size must be a pair of ints, got None", {"window_size": (None, 0)}),
    (ValueError, r"ALiBi slopes must be \(H_q,\) = \(4,\) or \(B, H_q\) = \(2, 4\)",
     {"alibi_slopes": torch.ones(3, 4)}),
    (ValueError, r"ALiBi slopes \(B, H_q\) must not require grad",
     {"alibi_slopes": torch.ones(2, 4, requires_grad=True)}),
    (ValueError, "dropout_p must be between 0 and 1", {"dropout_p": -0.1}),
    (ValueError, "k and v must share heads and length", {"v": X[:, :4]}),
)  # fmt: skip


@each(("error", "message", "wrong"), INVALID)
def test_invalid_arguments(error: type[Exception], message: str, wrong: dict[str, Any]) -> None:
    flash_attn_func(X, X, X)
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": X, "k": X, "v": X} | wrong)


def test_invalid_packed_tensors() -> None:
    with pytest.raises(ValueError, match=r"kv must be \(batch, seqlen, 2, heads_k, headdim\)"):
        flash_attn_kvpacked_func(X, torch.randn(2, 5, 3, 4, 8))
    with pytest.raises(ValueError, match=r"qkv must be \(batch, seqlen, 3, heads, headdim\)"):
        flash_attn_qkvpacked_func(X)


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]])
INDICES = [0, 1, 2, 11, 13, 14]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_unpad_input(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2, 4)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    assert indices.tolist() == INDICES
    assert torch.equal(packed, x.flatten(0, 1)[INDICES])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 3, 6], torch.int32)
    assert (longest, used.tolist(), used.dtype) == (3, [3, 0, 3], torch.int32)
    padded = pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * MASK[..., None, None])


def test_unused_tokens() -> None:
    """They are packed, but not counted as used."""
    x, unused = torch.randn(3, 5, 4), torch.zeros_like(MASK)
    unused[0, 4] = unused[1, 2] = 1
    packed, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert indices.tolist() == [0, 1, 2, 4, 7, 11, 13, 14]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 8], 4, [3, 0, 3])


def test_concatenated_sequences() -> None:
    x = torch.randn(2, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, *range(6, 12)]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 5, 11], torch.int32, 6)


def test_rows() -> None:
    x, indices = torch.randn(5, 3), torch.tensor([4, 0])
    assert torch.equal(index_first_axis(x, indices), x[indices])
    rows, same = index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert same is x
    put = index_put_first_axis(rows, indices, 5)
    assert torch.equal(put[indices], rows)
    assert torch.equal(put[[1, 2, 3]], torch.zeros(3, 3))


def test_derivatives() -> None:
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: unpad_input(x, MASK)[0], (x,))
    packed = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor(INDICES)
    assert gradcheck(lambda packed: pad_input(packed, indices, 3, 5), (packed,))


def test_empty_batches() -> None:
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.randn(0, 5, 4), MASK[:0])
    assert (packed.shape, indices.tolist(), cu_seqlens.tolist()) == ((0, 4), [], [0])
    assert (longest, used.tolist()) == (0, [])
    assert pad_input(packed, indices, 0, 5).shape == (0, 5, 4)
    assert pad_input(packed, indices, 2, 5).tolist() == [[[0.0] * 4] * 5] * 2


INVALID_MASKS: tuple[tuple[type[Exception], str, Tensor], ...] = (
    (TypeError, "must be a tensor of integers or bool", torch.ones(3, 5)),
    (ValueError, r"must be \(batch, seqlen\) = \(3, 5\), got \(3, 4\)", MASK[:, :4]),
    (ValueError, r"must be .* = \(3, 5\), got \(15,\)", MASK.flatten()),
)


@each(("error", "message", "mask"), INVALID_MASKS)
def test_invalid_masks(error: type[Exception], message: str, mask: Tensor) -> None:
    x = torch.randn(3, 5, 4)
    with pytest.raises(error, match="attention_mask " + message):
        unpad_input(x, mask)
    with pytest.raises(error, match="unused_mask " + message):
        unpad_input(x, MASK, mask)
    with pytest.raises(error, match="attention_mask_in_length " + message):
        unpad_input_for_concatenated_sequences(x, mask)
