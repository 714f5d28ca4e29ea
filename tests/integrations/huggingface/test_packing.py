"""Packed documents: as if each were a row of its own, with every cache and in compiled code."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.integrations.huggingface.tiny_models import assert_close, build, tokens
from transformer_kernels.integrations.huggingface import NAME
from transformer_kernels.integrations.huggingface.attention import attention_forward
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask
from transformer_kernels.integrations.huggingface.packing import (
    document_ids,
    mask_of_lengths,
    mask_of_positions,
)

LENGTHS = (7, 1, 4, 9)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]
CU_SEQLENS = torch.tensor([0, 7, 8, 12, 21], dtype=torch.int32)

MODELS = pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma3"])


def separated(model: Any, text: Tensor) -> Tensor:
    return torch.cat([model(part).logits for part in text.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("use_cache", [True, False])
@MODELS
def test_documents_are_separate(name: str, use_cache: bool) -> None:
    model, text = build(name), tokens(21, batch=1)
    packed = model(text, position_ids=POSITIONS, use_cache=use_cache).logits
    assert_close(packed, separated(model, text))


@pytest.mark.exhaustive
@MODELS
def test_documents_are_separate_in_compiled_code(name: str) -> None:
    model, text = build(name), tokens(21, batch=1)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(text, position_ids=POSITIONS).logits, separated(model, text))


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_compiled", [False, True])
def test_documents_are_separate_with_a_padding_mask(is_compiled: bool) -> None:
    """Of ones, or with padding at the end. "eager" mixes the documents then."""
    model, text = build("llama"), tokens(21, batch=1)
    expected = separated(model, text)
    model.set_attn_implementation("eager")
    visible = torch.ones(1, 21)
    mixed = model(text, attention_mask=visible, position_ids=POSITIONS).logits
    assert (mixed - expected).abs().max() > 0.1
    model.set_attn_implementation(NAME)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    ours = run(text, attention_mask=visible, position_ids=POSITIONS).logits
    assert_close(ours, expected)
    visible[:, 19:] = 0
    ours = run(text, attention_mask=visible, position_ids=POSITIONS).logits
    assert_close(ours[:, :19], expected[:, :19])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "positions",
    [
        [*range(8), *range(108, 116)],  # a jump, as in PoSE, and where a prompt was shortened
        [n // 3 for n in range(16)],  # groups, as in Self-Extend
        [0, 1, *[2] * 9, *range(3, 8)],  # an image
        [*[0] * 9, *range(1, 8)],
    ],
)
def test_one_document(positions: list[int]) -> None:
    """With a cache positions that jump, or that tokens share, do not divide it, as in "eager"."""
    model, text = build("llama"), tokens(16, batch=2)
    arguments = {"input_ids": text, "position_ids": torch.tensor([positions])}
    ours = model(**arguments).logits
    model.set_attn_implementation("eager")
    assert_close(ours, model(**arguments).logits)


@pytest.mark.exhaustive
def test_bidirectional_models_do_not_read_positions() -> None:
    model, text = build("bert"), tokens(21, batch=1)
    ours = model(text, position_ids=POSITIONS).logits
    model.set_attn_implementation("eager")
    assert_close(ours, model(text, position_ids=POSITIONS).logits)


@pytest.mark.parametrize("is_causal", [True, False])
def test_boundaries(is_causal: bool) -> None:
    """`cu_seq_lens_q`, as transformers' collator of flattened rows passes it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 21, 8) for _ in range(3))
    o, _ = attention_forward(
        nn.Module(), q, k, v, None, is_causal=is_causal, cu_seq_lens_q=CU_SEQLENS
    )
    mask = tk.Mask.causal() if is_causal else None
    parts = zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat([tk.attention(*part, mask=mask) for part in parts], dim=2)
    assert_close(o.transpose(1, 2), expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_boundaries_of_several_rows(is_causal: bool) -> None:
    """In the rows one after the other, as flash_attn takes them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 8, 4) for _ in range(3))
    cu_seqlens = torch.tensor([0, 3, 8, 9, 16])
    arguments: dict[str, Any] = {"is_causal": is_causal, "cu_seq_lens_q": cu_seqlens}
    o, _ = attention_forward(nn.Module(), q, k, v, None, **arguments)
    flat = [x.transpose(1, 2).reshape(1, 16, 2, 4).transpose(1, 2) for x in (q, k, v)]
    q, k, v = flat
    expected, _ = attention_forward(nn.Module(), q, k, v, None, **arguments)
    assert_close(o.reshape(1, 16, 2, 4), expected)


def test_boundaries_of_queries_and_of_keys() -> None:
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    lengths: Any = {"cu_seq_lens_q": [0, 2, 5], "cu_seq_lens_k": [0, 6, 9]}
    lengths = {name: torch.tensor(boundaries) for name, boundaries in lengths.items()}
    o, _ = attention_forward(nn.Module(), q, k, v, None, **lengths)
    parts = [x.split(n, 2) for x, n in ((q, [2, 3]), (k, [6, 3]), (v, [6, 3]))]
    expected = torch.cat([tk.attention(*part) for part in zip(*parts, strict=True)], dim=2)
    assert_close(o.transpose(1, 2), expected)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("shapes", "boundaries", "message"),
    [
        ((2, 8, 8), ([0, 5, 16], None), "cu_seq_lens_q must have a boundary at each of the 2 rows"),
        ((2, 8, 8), ([0, 3, 8], None), "cu_seq_lens_q must have a boundary at each of the 2 rows"),
        ((1, 5, 8), ([0, 3, 5], None), "cu_seq_lens_q needs cu_seq_lens_k for 5 queries and 8"),
        ((1, 8, 8), ([0, 3, 8], [0, 4, 8]), "cu_seq_lens_k must equal cu_seq_lens_q in a causal"),
        ((1, 5, 8), ([0, 3, 5], [0, 4, 8]), "cu_seq_lens_k must equal cu_seq_lens_q in a causal"),
    ],
)
def test_boundaries_that_are_refused(
    shapes: tuple[int, int, int],
    boundaries: tuple[list[int], list[int] | None],
    message: str,
    is_compiled: bool,
) -> None:
    B, M, N = shapes
    q_bounds, k_bounds = (None if one is None else torch.tensor(one) for one in boundaries)
    assert q_bounds is not None

    def documents(q_bounds: Tensor, k_bounds: Tensor | None) -> Tensor:
        mask = mask_of_lengths(q_bounds, k_bounds, B, M, N, is_causal=True)
        return mask.materialize(B, 1, M, N)

    run = torch.compile(documents, backend="aot_eager") if is_compiled else documents
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(q_bounds, k_bounds)


def test_segments() -> None:
    ids = mask_of_lengths(CU_SEQLENS, None, 1, 21, 21, is_causal=True).materialize(1, 1, 21, 21)
    assert torch.equal(ids[0, 0], IDS[0, :, None] == IDS)
    by_position = mask_of_positions(POSITIONS, None, 2)
    assert by_position is not None
    assert torch.equal(by_position.materialize(2, 1, 21, 21), ids.expand(2, -1, -1, -1))
    assert mask_of_positions(3 + torch.arange(21)[None], None, 2) is None


@pytest.mark.parametrize(
    ("positions", "tokens", "documents"),
    [
        ([0, 1, 2, 0, 1, 0, 0, 1], None, [0, 0, 0, 1, 1, 2, 3, 3]),
        ([5, 6, 7, 0, 1, 0, 1, 2], None, [0, 0, 0, 1, 1, 2, 2, 2]),  # begins within a document
        ([3, 4, 5, 3, 4, 5, 6, 7], None, [0, 0, 0, 1, 1, 1, 1, 1]),
        ([0, 1, 2, 7, 8, 9, 4, 5], None, [0] * 8),
        ([0, 0, 0, 0, 1, 2, 3, 4], None, [0] * 8),
        # padding, with the positions that transformers' models give it
        ([1, 1, 1, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8),
        ([0, -1, 1, 2, -1, 3, 4, -1], [1, 0, 1, 1, 0, 1, 1, 0], [0] * 8),
        ([0, 1, 2, 3, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0] * 8),
        ([0, 1, 2, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]),
        ([0, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0] * 8),
    ],
)
def test_documents_by_position(
    positions: list[int], tokens: list[int] | None, documents: list[int]
) -> None:
    visible = None if tokens is None else torch.tensor([tokens]).bool()
    assert document_ids(torch.tensor([positions]), visible).tolist() == [documents]


def test_positions_are_read_once() -> None:
    """Every layer asks about the same tensor."""
    mask = LazyMask(tk.Mask.causal(), (1, 21, 21), torch.device("cpu"), may_be_packed=True)
    x = torch.randn(1, 2, 21, 8)
    with mock.patch(f"{attention_forward.__module__}.mask_of_positions") as read:
        read.return_value = None
        for positions, count in ((POSITIONS, 1), (POSITIONS, 1), (POSITIONS.clone(), 2)):
            attention_forward(nn.Module(), x, x, x, mask, is_causal=True, position_ids=positions)
            assert read.call_count == count


def test_batches_of_one_tensor_do_not_share_a_mask() -> None:
    for B in (1, 3):
        mask = mask_of_positions(POSITIONS, None, B)
        assert mask is not None
        assert mask.tensors()[0][1].shape == (B, 21)
