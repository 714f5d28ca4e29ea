"""Multi-head self-attention in linear time, with a state of constant size.

A query's weight of a key is phi(q) . phi(k), without an exponential, so that the sums over the keys
do not depend on the query: all that a query needs to know of earlier tokens is one matrix and one
vector of each head.

Source: Transformers are RNNs (Katharopoulos et al., 2020, arXiv:2006.16236).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..functional.linear_attention import linear_attention
from ..functional.linear_decode import linear_attention_decode
from ..linear.types import FeatureMap, LinearState
from ..masks.mask import Mask
from ..scores.alibi import alibi_slopes
from .attention import AttentionLayer, size_of_heads
from .options import AttnImplementation

LinearImplementation = Literal["eager", "fused"]
"""eager: chunks of tokens in plain torch. fused: these kernels."""


class LinearSelfAttention(AttentionLayer):
    """Multi-head self-attention whose time is linear in the number of tokens.

    Attention weights are not stored, and have no dropout. See `linear_attention` for the formula.

    Args:
        width: size of the input and output vectors.
        heads: number of heads; divides `width`.
        feature_map: phi; see `linear_attention`.
        causal: True if a query sees no later position.
        decay: True if the weight of key j for query i is multiplied by exp(-slope * (i - j)), with
            the slopes of ALiBi: heads forget at different rates, and positions are relative.
        bias: True if the query, key and value projections have a bias; `out_proj` always does.
        attn_implementation: "eager" or "fused". torch's SDPA does not compute linear attention.

    Raises:
        ValueError: an option is out of range or not one of its choices.
    """

    implementations: ClassVar[Any] = LinearImplementation
    log_decay: Tensor | None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        feature_map: FeatureMap = "elu",
        causal: bool = True,
        decay: bool = False,
        bias: bool = False,
        attn_implementation: AttnImplementation = "fused",
    ) -> None:
        size = size_of_heads(width, heads)
        super().__init__(width, heads, size, attn_implementation=attn_implementation)
        if decay and not causal:
            raise ValueError("decay needs causal=True: weights decay with the distance to the past")
        self.feature_map = feature_map
        self.causal = causal
        log_decay = -alibi_slopes(heads) if decay else None
        self.register_buffer("log_decay", log_decay, persistent=False)
        self.queries = nn.Linear(width, width, bias=bias)
        self.keys = nn.Linear(width, width, bias=bias)
        self.values = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width)

    def new_state(self, batch: int) -> LinearState:
        """Returns the state before the first token: zeros, float64 for a layer in float64 and
        float32 for all others."""
        weight = self.keys.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        S = weight.new_zeros(batch, self.heads, self.head_size, self.head_size, dtype=dtype)
        return LinearState(S, S.new_zeros(S.shape[:-1]))

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, state: LinearState | None = None
    ) -> Tensor:
        """Attention from x to itself, and to the tokens in the state.

        Args:
            x: inputs (B, T, width).
            mask: `Mask.padding` or `Mask.key_range`: the keys that exist; None shows all.
            state: state after the tokens before x, from `new_state` at first. It is updated in
                place. Attention is causal, and autograd does not apply.

        Returns:
            (B, T, width).

        Raises:
            ValueError: both `mask` and `state` are given, or a state and a layer that is not
                causal; or an argument is invalid for `linear_attention`.
        """
        q, k, v = self._to_heads(x, self.queries, self.keys, self.values)
        backend = "reference" if self.attn_implementation == "eager" else "auto"
        if state is None:
            o = linear_attention(
                q, k, v,
                feature_map=self.feature_map, causal=self.causal, mask=mask,
                log_decay=self.log_decay, backend=backend,
            )  # fmt: skip
        elif mask is not None or not self.causal:
            raise ValueError(
                "a state needs a causal layer and no mask, "
                f"got causal={self.causal} and mask={mask}"
            )
        else:
            with torch.no_grad():
                o = linear_attention_decode(
                    q, k, v, state,
                    feature_map=self.feature_map, log_decay=self.log_decay, backend=backend,
                )  # fmt: skip
        return self._out_proj(o)
