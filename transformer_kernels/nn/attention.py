"""Attention layers: `attend`, with three implementations, and multi-head attention."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..functional.attention import attention as attention_operator
from ..masks.mask import Mask
from ..scores.relative import Relative
from .cache import LayerCache
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
    if attn_implementation == "sdpa":
        check_undivided("attn_implementation='sdpa'")
        if relative is not None:
            dense = relative.as_bias(q, k.shape[-2], scale)
            bias = dense if bias is None else bias + dense
        return _sdpa(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    backend = "reference" if attn_implementation == "eager" else "auto"
    return attention_operator(
        q, k, v,
        mask=mask, bias=bias, relative=relative, scale=scale, dropout_p=dropout_p, backend=backend,
    )  # fmt: skip


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None,
    bias: Tensor | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
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


def head_size(width: int, heads: int, form: HeadForm) -> int:
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


class MultiHeadAttention(nn.Module):
    """Multi-head attention with separate query, key and value projections.

    `form="narrow"` is the standard form: heads of size width // heads. `form="wide"` projects to
    `heads` heads of the full width and needs `heads` times the memory. Both forms scale scores by
    1/sqrt(head size) and end in a projection back to `width`.

    Heads are strided views of the projections, without a copy. The attention matrix is not stored.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        form: HeadForm = "narrow",
        scaling: Scaling = "scores",
        bias: bool = False,
        dropout: float = 0.0,
        source_width: int | None = None,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        """Creates the four projections.

        Args:
            width: size of the input and output vectors.
            heads: number of heads; divides `width` in the narrow form.
            form: "narrow" or "wide".
            scaling: "scores" or "inputs"; see `Scaling`.
            bias: True if the query, key and value projections have a bias; `out_proj` always does.
            dropout: probability of dropping an attention weight, in training mode only.
            source_width: size of the vectors that keys and values are projected from; `width`
                unless given.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ValueError: an option is out of range or not one of its choices.
        """
        super().__init__()
        check_choice("scaling", scaling, Scaling)
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        check_probability("dropout", dropout)
        self.heads = heads
        self.head_size = head_size(width, heads, form)
        self.scaling = scaling
        self.dropout = dropout
        self.attn_implementation = attn_implementation
        inner = heads * self.head_size
        source_width = width if source_width is None else source_width
        self.queries = nn.Linear(width, inner, bias=bias)
        self.keys = nn.Linear(source_width, inner, bias=bias)
        self.values = nn.Linear(source_width, inner, bias=bias)
        self.out_proj = nn.Linear(inner, width)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention from x to `source`.

        A fully masked query gets the bias of `out_proj`.

        Args:
            x: queries' inputs (B, M, width).
            source: keys' and values' inputs (B, N, source_width); x unless given.
            mask: the visible pairs; None shows all.
            cache: the layer's key/value cache, already extended by M positions. Keys and values of
                x are stored in it, attention is causal, and neither dropout nor autograd applies.

        Returns:
            (B, M, width).

        Raises:
            ValueError: both `mask` and `cache` are given.
        """
        k, v = self.keys_and_values(x if source is None else source)
        if cache is None:
            return self.attend_to(x, k, v, mask=mask)
        if mask is not None:
            raise ValueError(
                f"mask must be None with a cache, whose attention is causal, got {mask}"
            )
        q = self._queries(x)
        return self._out_proj(
            cache.attend(q, k, v, scale=self._scale, attn_implementation=self.attn_implementation)
        )

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `source` (B, N, source_width), each (B, heads, N, head_size)."""
        k = split_heads(self.keys(source), self.heads)
        if self.scaling == "inputs":
            k = divide_by_fourth_root(k)
        return k, split_heads(self.values(source), self.heads)

    def attend_to(self, x: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None) -> Tensor:
        """`forward` for keys and values computed before by `keys_and_values`."""
        dropout_p = self.dropout if self.training else 0.0
        o = attend(
            self._queries(x), k, v,
            mask=mask, scale=self._scale, dropout_p=dropout_p,
            attn_implementation=self.attn_implementation,
        )  # fmt: skip
        return self._out_proj(o)

    @property
    def _scale(self) -> float | None:
        return 1.0 if self.scaling == "inputs" else None

    def _queries(self, x: Tensor) -> Tensor:
        q = split_heads(self.queries(x), self.heads)
        return divide_by_fourth_root(q) if self.scaling == "inputs" else q

    def _out_proj(self, o: Tensor) -> Tensor:
        y: Tensor = self.out_proj(merge_heads(o))
        return y
