"""Key/value cache for token-by-token generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..functional.decode import attention_decode
from ..scores.relative import Relative
from .options import AttnImplementation, check_positive


class KVCache:
    """Keys and values of every layer of a model, for a batch of sequences of equal length.

    For inference only: cached keys and values have no gradient.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates an empty cache of `capacity` positions for each sequence."""
        sizes = {"layers": layers, "heads": heads, "capacity": capacity, "head_size": head_size}
        for name, size in sizes.items():
            check_positive(name, size)
        shape = (layers, batch, heads, capacity, head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        """(batch,): `length` for each sequence, as `attention_decode` needs it."""
        self.length = 0
        """Number of positions in use."""

    @property
    def capacity(self) -> int:
        """Largest number of positions that the cache can hold."""
        return self.keys.shape[3]

    def extend(self, count: int) -> int:
        """Adds `count` positions, which every layer then fills; returns the first of them.

        Raises ValueError if they exceed the capacity.
        """
        first = self.length
        if first + count > self.capacity:
            raise ValueError(
                f"count must be at most {self.capacity - first}, the free positions of a cache "
                f"of capacity {self.capacity} and length {first}, got {count}"
            )
        self.length += count
        self.cache_seqlens += count
        return first

    def layer(self, n: int) -> LayerCache:
        """Layer n of the cache, as a view."""
        return LayerCache(self.keys[n], self.values[n], self.cache_seqlens, self.length)


@dataclass(frozen=True)
class LayerCache:
    """Key/value cache of one attention layer."""

    keys: Tensor
    """(B, heads, capacity, head_size)"""
    values: Tensor
    """(B, heads, capacity, head_size)"""
    cache_seqlens: Tensor
    """(B,) int32: `length` for each sequence"""
    length: int
    """Number of positions in use, new ones included"""

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the last M keys and values, (B, heads, M, head_size) each.

        Returns:
            All keys and values in use, (B, heads, length, head_size) each: views of the cache.
        """
        M = k.shape[2]
        self.keys[:, :, self.length - M : self.length] = k
        self.values[:, :, self.length - M : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        relative: Relative | None = None,
        attn_implementation: AttnImplementation,
    ) -> Tensor:
        """Stores the last M keys and values, and computes causal attention of q to the cache.

        Inputs are converted to the dtype of the cache, because autocast may have narrowed them.

        Args:
            q: queries (B, heads, M, head_size) of the last M positions.
            k: keys (B, heads, M, head_size) of the same positions.
            v: values (B, heads, M, head_size) of the same positions.
            scale: multiplies q kᵀ; 1/sqrt(head_size) if None.
            relative: bias or keys by distance with align="bottom_right".
            attn_implementation: "eager", "fused" or "sdpa".

        Returns:
            (B, heads, M, head_size) in the dtype of the cache.
        """
        keys, values = self.append(k, v)
        q = q.to(self.keys.dtype)
        if attn_implementation == "sdpa":
            return _sdpa(q, keys, values, scale, relative)
        backend = "reference" if attn_implementation == "eager" else "auto"
        return attention_decode(
            q, self.keys, self.values, self.cache_seqlens,
            scale=scale, relative=relative, backend=backend,
        )  # fmt: skip


def _sdpa(
    q: Tensor, keys: Tensor, values: Tensor, scale: float | None, relative: Relative | None
) -> Tensor:
    M, N = q.shape[2], keys.shape[2]
    visible = torch.ones(M, N, dtype=torch.bool, device=q.device).tril(N - M)
    attn_mask = visible
    if relative is not None:
        attn_mask = relative.as_bias(q, N, scale).masked_fill(~visible, float("-inf"))
    return nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=attn_mask, scale=scale
    )
