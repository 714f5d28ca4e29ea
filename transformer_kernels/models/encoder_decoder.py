"""Greedy generation with encoder-decoder models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..masks.mask import Mask
from ..nn.cache import KVCache
from ..nn.inference import inference


@dataclass(frozen=True)
class Memory:
    """Encoded source, as input of the decoder's cross-attention."""

    keys_and_values: tuple[tuple[Tensor, Tensor], ...]
    """For each decoder block, keys and values (B, heads, S, head_size)"""
    mask: Mask | None
    """Mask of the source's padding; None without padding"""


class EncoderDecoder(Protocol):
    """Interface that `greedy_targets` requires of a model, which must be an `nn.Module`."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty decoder cache for `batch` targets of up to `capacity` tokens."""

    def memory(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Encodes source (B, S) int64 with source_lengths (B,)."""

    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        """target_in (B, T) int64, which follows the tokens in the cache -> logits (B, T, ...)."""


def greedy_targets(
    model: EncoderDecoder,
    source: Tensor,
    source_lengths: Tensor | None = None,
    *,
    vocabulary: int,
    begin: int,
    end: int,
    most: int,
    cached: bool,
) -> list[list[int]]:
    """Generates the most likely token at every step, until each target has ended.

    The model is in evaluation mode during the call, and its mode is restored afterwards.

    Args:
        model: the encoder-decoder model.
        source: (B, S) int64.
        source_lengths: (B,) integers, the number of tokens in each source; S unless given.
        vocabulary: number of target tokens.
        begin: token that every target starts with, not included in the result.
        end: token that ends a target, not included in the result.
        most: largest number of tokens in a target.
        cached: True to keep keys and values of previous tokens, which changes only the speed.

    Returns:
        the tokens of each target.

    Raises:
        ValueError: `begin` or `end` is not a token.
    """
    for name, token in (("begin", begin), ("end", end)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} must be a token from 0 to {vocabulary - 1}, got {token}")
    with inference(model):
        memory = model.memory(source, source_lengths)
        rows = _generate(model, memory, source.shape[0], begin, end, most, cached).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def _generate(
    model: EncoderDecoder, memory: Memory, B: int, begin: int, end: int, most: int, cached: bool
) -> Tensor:
    """(B, up to most): the tokens after `begin`; those after an `end` are unspecified."""
    keys, _ = memory.keys_and_values[0]
    cache = model.new_cache(B, most) if cached else None
    text = torch.full((B, 1), begin, device=keys.device)
    ended = torch.zeros(B, dtype=torch.bool, device=keys.device)
    while text.shape[1] <= most and not bool(ended.all()):
        logits = model.decode(text if cache is None else text[:, -1:], memory, cache=cache)
        token = logits[:, -1].argmax(dim=-1)
        text = torch.cat([text, token[:, None]], dim=1)
        ended |= token == end
    return text[:, 1:]
