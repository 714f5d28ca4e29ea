"""Packed documents: as if each were a row of its own, with every cache and in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.integrations.huggingface.tiny_models import assert_close, build, tokens
from transformer_kernels.integrations.huggingface.attention import attention_forward
from transformer_kernels.integrations.huggingface.packing import (
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
def test_a_padding_mask_decides_alone() -> None:
    """As in transformers: positions are read only if there is no padding mask."""
    model, text = build("llama"), tokens(21, batch=1)
    arguments = {"attention_mask": torch.ones(1, 21), "position_ids": POSITIONS}
    ours = model(text, **arguments).logits
    model.set_attn_implementation("eager")
    assert_close(ours, model(text, **arguments).logits)


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


def test_segments() -> None:
    ids = mask_of_lengths(CU_SEQLENS, 21).materialize(1, 1, 21, 21)
    assert torch.equal(ids[0, 0], IDS[0, :, None] == IDS)
    by_position = mask_of_positions(POSITIONS, 2)
    assert by_position is not None
    assert torch.equal(by_position.materialize(2, 1, 21, 21), ids.expand(2, -1, -1, -1))
    assert mask_of_positions(3 + torch.arange(21)[None], 2) is None


def test_positions_are_read_once() -> None:
    """Every layer asks about the same tensor; a change in place is seen."""
    positions = torch.arange(8)[None]
    assert mask_of_positions(positions, 1) is None
    positions[0, 4:] -= 4
    packed = mask_of_positions(positions, 1)
    assert packed is not None
    assert mask_of_positions(positions, 1) is packed
    with torch.inference_mode():
        inference = torch.arange(8)[None]
        assert mask_of_positions(inference, 1) is None
        inference[0, 4:] -= 4
        assert mask_of_positions(inference, 1) is not None


def test_batches_of_one_tensor_do_not_share_a_mask() -> None:
    for B in (1, 3):
        mask = mask_of_positions(POSITIONS, B)
        assert mask is not None
        assert mask.tensors()[0][1].shape == (B, 21)
