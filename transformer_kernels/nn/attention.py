"""Attention in three implementations, its key/value cache, and multi-head attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..functional.attention import attention as attention_operator
from ..functional.decode import attention_decode
from ..masks.mask import Mask
from ..scores.relative import Relative
from .options import AttnImplementation, check_choice, check_positive, check_probability

HeadForm = Literal["narrow", "wide"]
"""narrow: the head size is width // heads. wide: the head size is the full width."""

Scaling = Literal["scores", "inputs"]
"""scores: q kᵀ / sqrt(D). inputs: q and k are each divided by D^(1/4) before the product."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    relative: Relative | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    attn_implementation: AttnImplementation = "fused",
) -> Tensor:
    """Masked scaled dot-product attention, by the selected implementation.

    The three implementations agree to rounding. With dropout, only "eager" and "fused" do: they
    draw the same dropout bits, and "sdpa" draws its own.

    Args:
        q: queries (B, H, M, D).
        k: keys (B, H, N, D).
        v: values (B, H, N, D_v).
        mask: the visible pairs; None shows all. "sdpa" materializes every mask except exactly
            `Mask.causal()`.
        bias: added to the scaled scores; in q's dtype, broadcastable to (B, H, M, N).
        relative: bias or keys by distance; "sdpa" materializes them as a bias.
        scale: multiplies q kᵀ; 1/sqrt(D) unless given.
        dropout_p: probability of dropping an attention weight.
        attn_implementation: "eager", "fused" or "sdpa".

    Returns:
        o (B, H, M, D_v).

    Raises:
        TypeError, ValueError: `attn_implementation` is unknown, or an argument is invalid for
            `transformer_kernels.attention`.
    """
    check_choice("attn_implementation", attn_implementation, AttnImplementation)
    if attn_implementation != "sdpa":
        backend = "reference" if attn_implementation == "eager" else "auto"
        return attention_operator(
            q, k, v,
            mask=mask, bias=bias, relative=relative, scale=scale, dropout_p=dropout_p,
            backend=backend,
        )  # fmt: skip
    check_undivided("attn_implementation='sdpa'")
    if relative is not None:
        dense = relative.as_bias(q, k.shape[-2], scale)
        bias = dense if bias is None else bias + dense
    causal = bias is None and mask is not None and mask.constraints == Mask.causal().constraints
    attn_mask = bias
    if mask is not None and not causal:
        B, H, M, _ = q.shape
        visible = mask.materialize(B, H, M, k.shape[-2], q.device)
        attn_mask = visible if bias is None else bias.masked_fill(~visible, float("-inf"))
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=causal, scale=scale
    )


def basic_self_attention(x: Tensor, *, attn_implementation: AttnImplementation = "fused") -> Tensor:
    """Self-attention without parameters or scale: softmax(x xᵀ) x.

    It is permutation-equivariant: permuting the sequence permutes the result in the same way.

    Args:
        x: inputs (B, T, width).
        attn_implementation: "eager", "fused" or "sdpa".

    Returns:
        (B, T, width).

    Raises:
        ValueError: x is not three-dimensional, or `attn_implementation` is unknown.
    """
    if x.dim() != 3:
        raise ValueError(f"x must be (batch, length, width), got shape {tuple(x.shape)}")
    head = x[:, None]
    return attend(head, head, head, scale=1.0, attn_implementation=attn_implementation)[:, 0]


def divide_by_fourth_root(x: Tensor) -> Tensor:
    """x / D^(1/4), where D is the last dimension of x.

    Applied to both q and k, it is equivalent to dividing q kᵀ by sqrt(D). It keeps a product
    computed in half precision within range.
    """
    divisor: float = x.shape[-1] ** 0.25
    return x / divisor


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

    def reserve(self, count: int) -> None:
        """Makes room for `count` more positions: at least doubles a capacity that is too small."""
        missing = self.length + count - self.capacity
        if missing > 0:
            more = (0, 0, 0, max(missing, self.capacity))
            self.keys = nn.functional.pad(self.keys, more)
            self.values = nn.functional.pad(self.values, more)

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
            k: keys of the same positions, of the same shape.
            v: values of the same positions, of the same shape.
            scale: see `attend`.
            relative: bias or keys by distance with align="bottom_right".
            attn_implementation: "eager", "fused" or "sdpa".

        Returns:
            (B, heads, M, head_size) in the dtype of the cache.
        """
        keys, values = self.append(k, v)
        q = q.to(self.keys.dtype)
        if attn_implementation == "sdpa":
            mask = Mask.causal(align="bottom_right")
            return attend(
                q, keys, values,
                mask=mask, relative=relative, scale=scale, attn_implementation="sdpa",
            )  # fmt: skip
        backend = "reference" if attn_implementation == "eager" else "auto"
        return attention_decode(
            q, self.keys, self.values, self.cache_seqlens,
            scale=scale, relative=relative, backend=backend,
        )  # fmt: skip


def size_of_heads(width: int, heads: int, form: HeadForm = "narrow") -> int:
    """Size of one head. Raises ValueError if a narrow width is not a multiple of heads."""
    check_positive("width", width)
    check_positive("heads", heads)
    check_choice("form", form, HeadForm)
    if form == "wide":
        return width
    if width % heads:
        raise ValueError(
            f"width must be a multiple of heads in the narrow form, got {width} and {heads}"
        )
    return width // heads


def split_heads(projected: Tensor, heads: int) -> Tensor:
    """(..., T, heads * head_size) -> (..., heads, T, head_size), a view."""
    split: Tensor = projected.unflatten(-1, (heads, -1))
    return split.transpose(-3, -2)


def merge_heads(o: Tensor) -> Tensor:
    """(..., heads, T, head_size) -> (..., T, heads * head_size)."""
    return o.transpose(-3, -2).flatten(-2)


class AttentionLayer(nn.Module):
    """Base of the attention layers: their common options, and the way to the heads and back.

    Heads are strided views of the projections, without a copy.
    """

    implementations: ClassVar[Any] = AttnImplementation
    out_proj: nn.Linear

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: int,
        *,
        dropout: float = 0.0,
        attn_implementation: AttnImplementation,
    ) -> None:
        super().__init__()
        check_positive("width", width)
        check_positive("heads", heads)
        check_positive("head_size", head_size)
        check_probability("dropout", dropout)
        check_choice("attn_implementation", attn_implementation, self.implementations)
        self.heads = heads
        self.head_size = head_size
        self.dropout = dropout
        self.attn_implementation = attn_implementation

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _to_heads(self, x: Tensor, *layers: nn.Module) -> Iterator[Tensor]:
        """Projections of x (B, T, width): (B, heads, T, head_size) for each layer."""
        return (split_heads(layer(x), self.heads) for layer in layers)

    def _out_proj(self, o: Tensor) -> Tensor:
        """o (B, heads, T, head_size) -> (B, T, width)."""
        y: Tensor = self.out_proj(merge_heads(o))
        return y


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention with separate query, key and value projections.

    `form="narrow"` is the standard form: heads of size width // heads. `form="wide"` projects to
    `heads` heads of the full width and needs `heads` times the memory. Both forms scale scores by
    1/sqrt(head size) and end in a projection back to `width`. The attention matrix is not stored.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        form: HeadForm = "narrow",
        head_size: int | None = None,
        scaling: Scaling = "scores",
        bias: bool = False,
        out_bias: bool = True,
        dropout: float = 0.0,
        source_width: int | None = None,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        """Creates the four projections.

        Args:
            width: size of the input and output vectors.
            heads: number of heads; divides `width` in the narrow form.
            form: "narrow" or "wide".
            head_size: size of a head; that of the form unless given.
            scaling: "scores" or "inputs"; see `Scaling`.
            bias: True if the query, key and value projections have a bias.
            out_bias: True if `out_proj` has a bias.
            dropout: probability of dropping an attention weight, in training mode only.
            source_width: size of the vectors that keys and values are projected from; `width`
                unless given.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ValueError: an option is out of range or not one of its choices.
        """
        check_choice("scaling", scaling, Scaling)
        if head_size is None:
            head_size = size_of_heads(width, heads, form)
        super().__init__(
            width, heads, head_size, dropout=dropout, attn_implementation=attn_implementation
        )
        self.scaling = scaling
        self._scale = 1.0 if scaling == "inputs" else None
        inner = heads * head_size
        source_width = width if source_width is None else source_width
        self.queries = nn.Linear(width, inner, bias=bias)
        self.keys = nn.Linear(source_width, inner, bias=bias)
        self.values = nn.Linear(source_width, inner, bias=bias)
        self.out_proj = nn.Linear(inner, width, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        relative: Relative | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention from x to `source`.

        A fully masked query gets the bias of `out_proj`.

        Args:
            x: queries' inputs (B, M, width).
            source: keys' and values' inputs (B, N, source_width); x unless given.
            mask: the visible pairs; None shows all.
            relative: bias or keys by distance; with a cache, aligned "bottom_right".
            cache: the layer's key/value cache, already extended by M positions. Keys and values of
                x are stored in it, attention is causal, and neither dropout nor autograd applies.

        Returns:
            (B, M, width).

        Raises:
            ValueError: both `mask` and `cache` are given.
        """
        k, v = self.keys_and_values(x if source is None else source)
        if cache is None:
            return self.attend_to(x, k, v, mask=mask, relative=relative)
        if mask is not None:
            raise ValueError(
                f"mask must be None with a cache, whose attention is causal, got {mask}"
            )
        o = cache.attend(
            self._queries(x), k, v,
            scale=self._scale, relative=relative, attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o)

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `source` (B, N, source_width), each (B, heads, N, head_size)."""
        k = split_heads(self.keys(source), self.heads)
        if self.scaling == "inputs":
            k = divide_by_fourth_root(k)
        return k, split_heads(self.values(source), self.heads)

    def attend_to(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        relative: Relative | None = None,
    ) -> Tensor:
        """`forward` for keys and values computed before by `keys_and_values`."""
        o = attend(
            self._queries(x), k, v,
            mask=mask, relative=relative, scale=self._scale, dropout_p=self._dropout_p,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o)

    def _queries(self, x: Tensor) -> Tensor:
        q = split_heads(self.queries(x), self.heads)
        return divide_by_fourth_root(q) if self.scaling == "inputs" else q
