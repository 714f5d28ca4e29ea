"""Autoregressive generation: by sampling from a language model, greedily by an encoder-decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import KVCache, MultiHeadAttention
from ..nn.blocks import Stack
from ..nn.masking import padding_mask
from ..nn.options import check_positive


@contextmanager
def inference(model: object) -> Iterator[torch.device]:
    """Context manager without gradients and dropout, which yields the device of the model.

    `model` must be an `nn.Module`; its training mode is restored at the end.
    """
    assert isinstance(model, nn.Module)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


@runtime_checkable
class LanguageModel(Protocol):
    """Interface that `generate` requires of a model with a context, which must be an `nn.Module`.

    See `StatefulLanguageModel` for the other kind of model.
    """

    @property
    def context(self) -> int:
        """Largest number of tokens that the model can attend to."""

    def new_cache(self, batch: int) -> KVCache | None:
        """Returns an empty cache for `batch` sequences, with the capacity of the context; None if
        the model has no cache and reads the whole context for each token."""

    def __call__(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """tokens (B, T) int64, which follow those in the cache -> logits (B, T, vocabulary)."""


State = tuple[Tensor, ...]
"""Tensors (B, ...) that a model keeps of a text of any length."""


@runtime_checkable
class StatefulLanguageModel(Protocol):
    """Interface that `generate` requires of a model with a state, of a type of its own; it must be
    an `nn.Module`."""

    @property
    def context(self) -> int:
        """Largest number of tokens of a prompt that are read by one call."""

    def new_state(self, batch: int) -> Any:
        """Returns the state before the first token of `batch` sequences."""

    def __call__(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Any]:
        """tokens (B, T) int64 -> logits (B, T, vocabulary) and the state after them."""


def check_generation_arguments(prompt: Sequence[int], length: int, temperature: float) -> None:
    """Raises ValueError for an empty prompt, a negative length or an invalid temperature."""
    if not prompt:
        raise ValueError(f"prompt must have at least one token, got {prompt!r}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")


def generate(
    model: LanguageModel | StatefulLanguageModel,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float,
    generator: torch.Generator | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Yields `length` tokens that continue `prompt`, one by one.

    Tokens are sampled from softmax(logits / temperature). Dropout is disabled during each step.

    A `LanguageModel` attends to the last `context` tokens. Once the text exceeds the context,
    positions shift with every token, so that the cache is dropped and each step recomputes the
    whole window. A `StatefulLanguageModel` reads every token once: the prompt in segments of
    `context` tokens, then one token a step.

    Args:
        model: the language model; its training mode is restored after each step.
        prompt: tokens to continue, at least one.
        length: number of tokens to generate.
        temperature: divides the logits; 0 selects the most likely token.
        generator: random generator on the CPU; torch's default generator unless given.
        cached: True to keep keys and values of previous tokens, which changes only the speed. A
            `StatefulLanguageModel` always keeps its state.

    Raises:
        ValueError: an empty prompt, a negative length or an invalid temperature. It is raised by
            the call, before the first token is requested.
    """
    check_generation_arguments(prompt, length, temperature)
    text = list(prompt)
    last_logits = (
        _logits_by_state(model, text)
        if isinstance(model, StatefulLanguageModel)
        else _logits_by_cache(model, text, cached)
    )

    def tokens() -> Iterator[int]:
        for logits in islice(last_logits, length):
            text.append(sample(logits, temperature, generator))
            yield text[-1]

    return tokens()


def _logits_by_cache(model: LanguageModel, text: list[int], cached: bool) -> Iterator[Tensor]:
    """Logits of the last position of a growing text: (vocabulary,) float64 on the CPU."""
    cache = model.new_cache(1) if cached else None
    while True:
        if cache is not None and len(text) > model.context:
            cache = None
        new = text[-model.context :] if cache is None else text[cache.length :]
        with inference(model) as device:
            logits = model(torch.tensor([new], device=device), cache=cache)
        yield logits[0, -1].to("cpu", torch.float64)


def _logits_by_state(model: StatefulLanguageModel, text: list[int]) -> Iterator[Tensor]:
    """`_logits_by_cache` for a model with a state, which reads every token once."""
    state, read = model.new_state(1), 0
    while True:
        with inference(model) as device:
            new = torch.tensor([text[read:]], device=device)
            for segment in new.split(model.context, dim=1):
                logits, state = model(segment, state)
        read = len(text)
        yield logits[0, -1].to("cpu", torch.float64)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """Samples a token from logits (vocabulary,) float64, as `generate` does."""
    if temperature == 0.0:
        return int(logits.argmax())
    # Subtract the maximum first: a tiny temperature then gives -inf and never inf - inf.
    weights = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))


@dataclass(frozen=True)
class Memory:
    """Encoded source, as input of the decoder's cross-attention."""

    keys_and_values: tuple[tuple[Tensor, Tensor], ...]
    """For each decoder block, keys and values (B, heads, S, head_size)"""
    mask: Mask | None
    """Mask of the source's padding; None without padding"""


class EncoderDecoder(nn.Module, ABC):
    """Base of the encoder-decoder models: the source is encoded once, and targets follow from it.

    Shapes of the arguments of every method:

        source: (B, S) int64. Padding does not affect the result.
        source_lengths: (B,) integers, the number of tokens in each source; S unless given.
        target_in: (B, T) int64: a begin token, then the target without its end token. Trailing
            padding needs no lengths, because self-attention is causal; exclude its rows from the
            loss.

    S and T are limited by the context, if the model has one.
    """

    @property
    @abstractmethod
    def decoder_blocks(self) -> Stack:
        """Blocks of the decoder, each with a layer `memory_attention`."""

    @abstractmethod
    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Encodes the source -> (B, S, width). Outputs at padding are unspecified, never NaN."""

    @abstractmethod
    def decode(self, target_in: Tensor, memory: Memory, *, cache: KVCache | None = None) -> Tensor:
        """target_in (B, T), which follows the tokens in the cache -> logits (B, T, vocabulary)."""

    def forward(
        self, source: Tensor, target_in: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        """Computes logits of the next target token at every position.

        Returns:
            logits (B, T, vocabulary); row t depends on the whole source and on tokens 0 to t of
            `target_in`.

        Raises:
            TypeError, ValueError: a text is longer than the context, or `source_lengths` is
                invalid.
        """
        return self.decode(target_in, self.memory(source, source_lengths))

    def memory(self, source: Tensor, source_lengths: Tensor | None = None) -> Memory:
        """Encodes the source and computes the decoder's cross-attention keys and values.

        Needed once per source, for any number of calls of `decode`.
        """
        encoded = self.encode(source, source_lengths)
        keys_and_values = []
        for block in self.decoder_blocks:
            attention = block.memory_attention
            assert isinstance(attention, MultiHeadAttention)
            keys_and_values.append(attention.keys_and_values(encoded))
        return Memory(tuple(keys_and_values), padding_mask(source_lengths))

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty decoder cache for `batch` targets of up to `capacity` tokens."""
        return self.decoder_blocks.new_cache(batch, capacity)

    def greedy_targets(
        self,
        source: Tensor,
        source_lengths: Tensor | None = None,
        *,
        vocabulary: int,
        begin: int,
        end: int,
        most: int,
        cached: bool = True,
    ) -> list[list[int]]:
        """Generates the most likely token at every step, until each target has ended.

        The model is in evaluation mode during the call, and its mode is restored afterwards.

        Args:
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
            TypeError, ValueError: `most`, `begin`, `end` or `source_lengths` is out of range, or
                the source is longer than the context.
        """
        check_positive("most", most)
        for name, token in (("begin", begin), ("end", end)):
            if not 0 <= token < vocabulary:
                raise ValueError(f"{name} must be a token from 0 to {vocabulary - 1}, got {token}")
        B = source.shape[0]
        with inference(self) as device:
            memory = self.memory(source, source_lengths)
            cache = self.new_cache(B, most) if cached else None
            text = torch.full((B, 1), begin, device=device)
            ended = torch.zeros(B, dtype=torch.bool, device=device)
            while text.shape[1] <= most and not bool(ended.all()):
                logits = self.decode(text if cache is None else text[:, -1:], memory, cache=cache)
                likeliest = logits[:, -1].argmax(dim=-1)
                text = torch.cat([text, likeliest[:, None]], dim=1)
                ended |= likeliest == end
        rows = text[:, 1:].tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]
