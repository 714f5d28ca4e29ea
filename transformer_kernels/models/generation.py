"""Autoregressive generation: sampling of one token at a time from a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..nn.cache import KVCache
from ..nn.inference import inference


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
    """Interface that `generate` requires of a model with a state; it must be an `nn.Module`."""

    @property
    def context(self) -> int:
        """Largest number of tokens of a prompt that are read by one call."""

    def new_state(self, batch: int) -> State:
        """Returns the state before the first token of `batch` sequences."""

    def __call__(self, tokens: Tensor, state: State, /) -> tuple[Tensor, State]:
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
    reader = (
        _StatefulReader(model)
        if isinstance(model, StatefulLanguageModel)
        else _CachedReader(model, cached)
    )
    return _generate(reader, list(prompt), length, temperature, generator)


def _generate(
    reader: _StatefulReader | _CachedReader,
    text: list[int],
    length: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Iterator[int]:
    for _ in range(length):
        text.append(sample(reader.last_logits(text), temperature, generator))
        yield text[-1]


class _CachedReader:
    """Logits after a growing text, by a model with a key/value cache."""

    def __init__(self, model: LanguageModel, cached: bool) -> None:
        self.model = model
        self.cache = model.new_cache(1) if cached else None

    def last_logits(self, text: list[int]) -> Tensor:
        """Logits of the last position: (vocabulary,) float64 on the CPU."""
        if self.cache is not None and len(text) > self.model.context:
            self.cache = None
        cache = self.cache
        new = text[-self.model.context :] if cache is None else text[cache.length :]
        with inference(self.model) as device:
            logits = self.model(torch.tensor([new], device=device), cache=cache)
        return logits[0, -1].to("cpu", torch.float64)


class _StatefulReader:
    """Logits after a growing text, by a model with a state."""

    def __init__(self, model: StatefulLanguageModel) -> None:
        self.model = model
        self.state = model.new_state(1)
        self.read = 0

    def last_logits(self, text: list[int]) -> Tensor:
        """Logits of the last position: (vocabulary,) float64 on the CPU."""
        with inference(self.model) as device:
            new = torch.tensor([text[self.read :]], device=device)
            for segment in new.split(self.model.context, dim=1):
                logits, self.state = self.model(segment, self.state)
        self.read = len(text)
        return logits[0, -1].to("cpu", torch.float64)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """Samples a token from logits (vocabulary,) float64, as `generate` does."""
    if temperature == 0.0:
        return int(logits.argmax())
    # Subtract the maximum first: a tiny temperature then gives -inf and never inf - inf.
    weights = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))
