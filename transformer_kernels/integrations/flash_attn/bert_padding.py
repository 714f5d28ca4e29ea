"""`flash_attn.bert_padding`: takes the padding out of a batch, and puts it back.

Examples:
    >>> x, indices, cu_seqlens, max_seqlen, lengths = unpad_input(hidden_states, attention_mask)
    >>> hidden_states = pad_input(layers(x, cu_seqlens, max_seqlen), indices, batch, seqlen)

Source: flash_attn 2.8.4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...common.argument_checks import INTEGERS, check_tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows x[indices]: (len(indices), ...). Differentiable in x."""
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows x[indices], and x. Differentiable in x."""
    return index_first_axis(x, indices), x


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros (first_axis_dim, ...) with `values` in the rows `indices`, which are distinct.

    Differentiable in values.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch.

    Reads lengths on the host, which synchronises with a GPU.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers: nonzero marks the tokens.
        unused_mask: (batch, seqlen), bool or integers: nonzero marks further rows that are packed
            too, but are not counted as used.

    Returns:
        The packed tokens (total, ...), differentiable; their indices (total,) among the
        batch * seqlen rows; cu_seqlens (batch + 1,) int32; the longest length; and the tokens of
        each sequence without the unused ones, (batch,) int32.

    Raises:
        TypeError: attention_mask is not a tensor of integers or bool.
        ValueError: attention_mask is not (batch, seqlen).
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = rows = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        rows = used | (unused_mask != 0)
    lengths = rows.sum(dim=1, dtype=torch.int32)
    return *_packed(hidden_states, rows, lengths), used.sum(dim=1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the tokens of a padded batch whose rows hold several sequences one after another.

    Reads lengths on the host, which synchronises with a GPU.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), integers: the lengths of the sequences of each
            row, then zeros. [[2, 3, 0, 0, 0, 0]] is a row of 2 and 3 tokens and one of padding.

    Returns:
        The packed tokens (total, ...), differentiable; their indices (total,) among the
        batch * seqlen rows; cu_seqlens (sequences + 1,) int32; and the longest length.

    Raises:
        TypeError: attention_mask_in_length is not a tensor of integers.
        ValueError: attention_mask_in_length is not (batch, seqlen).
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    lengths = attention_mask_in_length
    column = torch.arange(lengths.shape[1], device=lengths.device)
    rows = column < lengths.sum(dim=1, keepdim=True)
    return _packed(hidden_states, rows, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns packed tokens as a padded batch (batch, seqlen, ...), with zeros as padding.

    Args:
        hidden_states: (total, ...), differentiable.
        indices: (total,), the rows among batch * seqlen, as `unpad_input` returns them.
        batch: batch size.
        seqlen: length of the padded sequences.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.reshape(batch, seqlen, *padded.shape[1:])


def _packed(
    hidden_states: Tensor, rows: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the rows that are True, which belong to sequences of these lengths."""
    indices = rows.flatten().nonzero().flatten()
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensor(name, mask, (torch.bool, *INTEGERS), wanted="a tensor of integers or bool")
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must be (batch, seqlen) = {tuple(hidden_states.shape[:2])}, "
            f"got {tuple(mask.shape)}"
        )
