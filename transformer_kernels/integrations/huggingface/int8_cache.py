"""A key/value cache of HuggingFace transformers in int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...functional.kv_cache import QuantizedCache, quantize_cache
from .int8_states import Int8States

_MOST_SPARE = 8
"""A full cache grows by at least one part in so many."""

_MOST_IN_PLACE = 16
"""More new tokens than these read a copy in their own dtype: it is smaller than the work."""


class Int8Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in int8, with a float32 scale for each token and head."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = quantize_cache(key_states[:, :, :0], value_states[:, :, :0])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values (B, H_kv, M, width).

        Returns:
            The same for the first call, a prompt, which attends to its own exact keys. Later:
            all tokens, as `Int8States`, or for many new tokens as a copy in their dtype.

        Raises:
            ValueError: a gradient is wanted, or the states are not finite.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("an Int8Cache is for inference: call the model under torch.no_grad()")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = quantize_cache(key_states, value_states)  # may raise: nothing is changed before
        first, self._length = self._length, self._length + key_states.shape[2]
        missing = self._length - self._stored.k_scale.shape[2]
        if missing > 0:
            self._change(lambda x: _longer(x, max(missing, first // _MOST_SPARE)))
        for all_tokens, tokens in zip(self._stored, new, strict=True):
            all_tokens[:, :, first : self._length] = tokens
        if first == 0:
            return key_states, value_states
        k, v, k_scale, v_scale = (x[:, :, : self._length] for x in self._stored)
        if key_states.shape[2] > _MOST_IN_PLACE:
            return _exact(k, k_scale, self.dtype), _exact(v, v_scale, self.dtype)
        return Int8States.of(k, k_scale), Int8States.of(v, v_scale)

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        super().reset()
        self._length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, as many as the argument is below 0."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        self._length = max(self._length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])

    def offload(self) -> None:
        self._change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda x: x.to(self.device, non_blocking=True))

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self._stored = QuantizedCache(*map(function, self._stored))


def _exact(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale[..., None]).to(dtype)


def _longer(x: Tensor, count: int) -> Tensor:
    """Returns a copy with room for `count` more tokens."""
    return pad(x, (*[0] * (2 * x.dim() - 6), 0, count))


class Int8Cache(DynamicCache):
    """A cache of `transformers` that stores keys and values in int8, for our attention.

    Examples:
        >>> cache = huggingface.Int8Cache(model.config)
        >>> model.generate(**inputs, past_key_values=cache)

    A prompt attends to its own exact keys; later tokens read int8 in place (`attention_decode`,
    `quantize_cache`). The cache takes 0.52 of the memory of bfloat16 for heads of 128. Layers with
    a sliding window or a recurrent state keep their own dtype.

    For inference. Masks may have windows and padding on one side; a model that adds a bias
    to its scores is refused.

    Args:
        config: configuration of the model.

    Source: docs/quickstarts/transformers.md, docs/drop-in.md.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [Int8Layer() if type(one) is DynamicLayer else one for one in self.layers]
