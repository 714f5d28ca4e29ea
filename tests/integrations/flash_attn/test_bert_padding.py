"""`flash_attn.bert_padding`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from transformer_kernels.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

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


INVALID: dict[str, tuple[Any, type[Exception]]] = {
    "must be a tensor of integers or bool": (torch.ones(3, 5), TypeError),
    r"must be \(batch, seqlen\) = \(3, 5\), got \(3, 4\)": (MASK[:, :4], ValueError),
    r"must be .* = \(3, 5\), got \(15,\)": (MASK.flatten(), ValueError),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_masks(message: str) -> None:
    mask, error = INVALID[message]
    x = torch.randn(3, 5, 4)
    with pytest.raises(error, match="attention_mask " + message):
        unpad_input(x, mask)
    with pytest.raises(error, match="unused_mask " + message):
        unpad_input(x, MASK, mask)
    with pytest.raises(error, match="attention_mask_in_length " + message):
        unpad_input_for_concatenated_sequences(x, mask)
