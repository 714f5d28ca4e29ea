"""Autoregressive generation: sampling of one token at a time from a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from transformer_kernels.nn.cache import KVCache


@runtime_checkable
class LanguageModel(Protocol):
    """Interface that `generate` requires of a language model, which must be an `nn.Module`."""

    @property
    def context(self) -> int:
        """Largest number of tokens that the model can attend to."""

    def new_cache(self, batch: int) -> KVCache:
        """Returns an empty cache for `batch` sequences, with the capacity of the context."""

    def __call__(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """tokens (B, T) int64, which follow those in the cache -> logits (B, T, vocabulary)."""


def check_generation_arguments(prompt: Sequence[int], length: int, temperature: float) -> None:
    """Raises ValueError for an empty prompt, a negative length or an invalid temperature."""
    if not prompt:
        raise ValueError(f"prompt must have at least one token, got {prompt!r}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float,
    generator: torch.Generator | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Yields `length` tokens that continue `prompt`, one by one.

    Tokens are sampled from softmax(logits / temperature). The model attends to the last `context`
    tokens. Once the text exceeds the context, positions shift with every token, so that the cache
    is dropped and each step recomputes the whole window. Dropout is disabled during each step.

    Args:
        model: the language model; its training mode is restored after each step.
        prompt: tokens to continue, at least one.
        length: number of tokens to generate.
        temperature: divides the logits; 0 selects the most likely token.
        generator: random generator on the CPU; torch's default generator unless given.
        cached: True to keep keys and values of previous tokens, which changes only the speed.

    Raises:
        ValueError: an empty prompt, a negative length or an invalid temperature. It is raised by
            the call, before the first token is requested.
    """
    check_generation_arguments(prompt, length, temperature)
    return _generate(model, list(prompt), length, temperature, generator, cached)


def _generate(
    model: LanguageModel,
    text: list[int],
    length: int,
    temperature: float,
    generator: torch.Generator | None,
    cached: bool,
) -> Iterator[int]:
    cache = model.new_cache(1) if cached else None
    for _ in range(length):
        if cache is not None and len(text) > model.context:
            cache = None
        new = text[-model.context :] if cache is None else text[cache.length :]
        text.append(sample(_last_logits(model, new, cache), temperature, generator))
        yield text[-1]


@torch.no_grad()
def _last_logits(model: LanguageModel, tokens: list[int], cache: KVCache | None) -> Tensor:
    """Logits of the last position: (vocabulary,) float64 on the CPU."""
    assert isinstance(model, nn.Module)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    logits = model(torch.tensor([tokens], device=device), cache=cache)[0, -1]
    model.train(was_training)
    return logits.to("cpu", torch.float64)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """Samples a token from logits (vocabulary,) float64, as `generate` does."""
    if temperature == 0.0:
        return int(logits.argmax())
    # Subtract the maximum first: a tiny temperature then gives -inf and never inf - inf.
    weights = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))
