"""Attention as the models use it: one call, three ways to compute it, and the multi-head module."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from transformer_kernels.functional.attention import attention as attention_operator
from transformer_kernels.masks.mask import Mask
from transformer_kernels.nn.cache import LayerCache
from transformer_kernels.nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
)

HeadForm = Literal["narrow", "wide"]
"""narrow: heads share the width, width // heads each. wide: every head has the full width."""

Scaling = Literal["scores", "inputs"]
"""scores: q kᵀ / sqrt(D). inputs: q and k each divided by D^(1/4) before the product."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    attn_implementation: AttnImplementation = "fused",
) -> Tensor:
    """Masked scaled dot-product attention, computed the way `attention` names.

    Shapes: q (B, H, M, D), k (B, H, N, D), v (B, H, N, D_v) -> (B, H, M, D_v). `scale` defaults to
    1/sqrt(D). The three ways agree to rounding; with dropout only "eager" and "fused" do, which
    draw the same bits, while "sdpa" draws its own. "sdpa" stores the whole mask, unless it is
    None or exactly `Mask.causal()`.
    """
    check_choice("attn_implementation", attn_implementation, AttnImplementation)
    if attn_implementation == "sdpa":
        return _torch_attention(q, k, v, mask=mask, scale=scale, dropout_p=dropout_p)
    backend = "reference" if attn_implementation == "eager" else "auto"
    return attention_operator(q, k, v, mask=mask, scale=scale, dropout_p=dropout_p, backend=backend)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None, scale: float | None, dropout_p: float
) -> Tensor:
    causal = mask is not None and mask.constraints == Mask.causal().constraints
    shown: Tensor | None = None
    if mask is not None and not causal:
        B, H, M, _ = q.shape
        shown = mask.materialize(B, H, M, k.shape[-2], q.device)
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=shown, dropout_p=dropout_p, is_causal=causal, scale=scale
    )


def basic_self_attention(x: Tensor, *, attn_implementation: AttnImplementation = "fused") -> Tensor:
    """softmax(x xᵀ) x: self-attention with no parameters and no scale; x and result (B, T, width).

    It sees a set: permuting the sequence permutes the result, and changes nothing else.
    """
    if x.dim() != 3:
        raise ValueError(f"x must be (batch, length, width), got shape {tuple(x.shape)}")
    head = x[:, None]
    return attend(head, head, head, scale=1.0, attn_implementation=attn_implementation)[:, 0]


def divide_by_fourth_root(x: Tensor) -> Tensor:
    """x / D^(1/4), D its last dimension.

    Done to q and to k, it stands for dividing q kᵀ by sqrt(D), and keeps a product that is formed
    in half precision within its range.
    """
    divisor: float = x.shape[-1] ** 0.25
    return x / divisor


def head_size(width: int, heads: int, form: HeadForm) -> int:
    """The size of one head; ValueError where width and heads do not fit each other."""
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


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each with its own queries, keys and values.

    `form="narrow"` projects to `width` and splits it into heads of width // heads, the standard
    form; `form="wide"` gives each head the full width, and needs `heads` times the memory. Both
    scale by the size of a head, and end in a projection back to `width`.

    Dropout acts on the attention weights, in training only. Attention heads are views of the
    projections: nothing is copied on the way in. No module keeps the attention matrix.
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
        """`source_width` is the width of what keys and values come from; `width` by default.

        `bias` is that of the three projections to heads; the last one always has it.
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
        """x (B, M, width) attends to `source` (B, N, source_width), or to itself -> (B, M, width).

        A query that the mask hides everything from takes nothing in: its result is the bias of the
        last projection. With a cache x follows what that has, to which its keys and values are
        added, and each position sees all up to its own: `mask` is None then, and nothing is
        dropped or differentiated.
        """
        k, v = self.keys_and_values(x if source is None else source)
        if cache is None:
            return self.attend_to(x, k, v, mask=mask)
        if mask is not None:
            raise ValueError(f"mask must be None with a cache, which is causal, got {mask}")
        q = self._queries(x)
        return self._out_proj(
            cache.attend(q, k, v, scale=self._scale, attn_implementation=self.attn_implementation)
        )

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Of `source` (B, N, source_width), each (B, heads, N, head_size), for `attend_to`."""
        k = self._split(self.keys(source))
        if self.scaling == "inputs":
            k = divide_by_fourth_root(k)
        return k, self._split(self.values(source))

    def attend_to(self, x: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None) -> Tensor:
        """The same as `forward`, where keys and values are there already."""
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
        q = self._split(self.queries(x))
        return divide_by_fourth_root(q) if self.scaling == "inputs" else q

    def _out_proj(self, o: Tensor) -> Tensor:
        y: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return y

    def _split(self, projected: Tensor) -> Tensor:
        """(B, T, heads * head_size) -> (B, heads, T, head_size), a view."""
        B, T, _ = projected.shape
        return projected.view(B, T, self.heads, self.head_size).transpose(1, 2)
