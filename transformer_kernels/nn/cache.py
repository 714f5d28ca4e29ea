"""Keys and values of what a model has written, so that each further token costs only itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.nn.options import AttnImplementation, check_positive


class KeyValueCache:
    """Of all layers of a model, and of texts that are equally long.

    For inference: what is kept has no gradient.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        heads: int,
        room: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`room` is how many positions there can be."""
        sizes = {"layers": layers, "heads": heads, "room": room, "head_size": head_size}
        for name, size in sizes.items():
            check_positive(name, size)
        shape = (layers, batch, heads, room, head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.written = 0
        """Positions in use; `lengths` says the same of each text"""

    @property
    def room(self) -> int:
        return self.keys.shape[3]

    def extend(self, count: int) -> int:
        """Takes `count` positions more into use, for every layer to fill; returns the first one.

        ValueError where there is no room for them.
        """
        first = self.written
        if first + count > self.room:
            raise ValueError(
                f"the cache has room for {self.room} positions, {first} of them in use, "
                f"and {count} are to follow"
            )
        self.written += count
        self.lengths += count
        return first

    def layer(self, n: int) -> LayerCache:
        """The part of layer n, a view."""
        return LayerCache(self.keys[n], self.values[n], self.lengths, self.written)


@dataclass(frozen=True)
class LayerCache:
    """Of one attention: keys and values (B, heads, room, head_size), lengths (B,) of `written`."""

    keys: Tensor
    values: Tensor
    lengths: Tensor
    written: int

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        attn_implementation: AttnImplementation,
    ) -> Tensor:
        """Puts k and v (B, heads, M, head_size) at the end, to which all positions up to its own
        are shown to each query of q -> (B, heads, M, head_size), in the dtype of the cache, to
        which all three are converted: autocast may have made them narrower."""
        M = k.shape[2]
        self.keys[:, :, self.written - M : self.written] = k
        self.values[:, :, self.written - M : self.written] = v
        q = q.to(self.keys.dtype)
        if attn_implementation == "sdpa":
            return self._by_torch(q, scale)
        backend = "reference" if attn_implementation == "eager" else "auto"
        return attention_decode(
            q, self.keys, self.values, self.lengths, scale=scale, backend=backend
        )

    def _by_torch(self, q: Tensor, scale: float | None) -> Tensor:
        keys, values = (x[:, :, : self.written] for x in (self.keys, self.values))
        shown = torch.ones(q.shape[2], self.written, dtype=torch.bool, device=q.device)
        shown = shown.tril(self.written - q.shape[2])
        return nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=shown, scale=scale
        )
