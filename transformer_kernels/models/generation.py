"""Text from a model of the next token, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from transformer_kernels.nn.cache import KeyValueCache


@runtime_checkable
class LanguageModel(Protocol):
    """What `generate` asks of a model, which is an `nn.Module`."""

    @property
    def context(self) -> int:
        """The most tokens that it sees at once."""

    def new_cache(self, batch: int) -> KeyValueCache:
        """An empty one, of its context."""

    def __call__(self, tokens: Tensor, *, cache: KeyValueCache | None = None) -> Tensor:
        """tokens (B, T) int64, those after what the cache has -> logits (B, T, vocabulary)."""


def check_generation_arguments(prompt: Sequence[int], length: int, temperature: float) -> None:
    """ValueError for what `generate` cannot do."""
    if not prompt:
        raise ValueError(f"prompt must have at least one token to go on from, got {prompt!r}")
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
    """Yields the `length` tokens that follow `prompt`, one by one.

    Each is drawn by `generator` (torch's own by default, on the CPU) from
    softmax(logits / temperature), and read back as input; temperature 0 takes the likeliest. The
    model sees the last `context` tokens: while that is all of them their keys and values are kept,
    unless `cached` is False; beyond, positions move with every token, and all is computed anew.
    Dropout is off meanwhile. ValueError as `check_generation_arguments` has it.
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
        new = text[-model.context :] if cache is None else text[cache.written :]
        text.append(sample(_last_logits(model, new, cache), temperature, generator))
        yield text[-1]


@torch.no_grad()
def _last_logits(model: LanguageModel, tokens: list[int], cache: KeyValueCache | None) -> Tensor:
    """(vocabulary,) float64 on the CPU."""
    assert isinstance(model, nn.Module)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    logits = model(torch.tensor([tokens], device=device), cache=cache)[0, -1]
    model.train(was_training)
    return logits.to("cpu", torch.float64)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """A token of logits (vocabulary,) float64, as `generate` draws it."""
    if temperature == 0.0:
        return int(logits.argmax())
    # Relative to the largest, so that a tiny temperature gives -inf, and never inf - inf.
    weights = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))
