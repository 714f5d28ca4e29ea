"""Lightning attention of MiniMax: linear attention with a decay of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linear_functions import Call, linear_scan


def lightning_attention(
    call: Call,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Computes the forward pass of a `MiniMaxLightningAttention`.

    Args:
        call: the call of the layer.
        layer: the layer.
        hidden_states: (B, T, width).
        position_embeddings: has no effect.
        attention_mask: padding mask (B, T); 0 = padding.
        past_key_values: a `MiniMaxCache`, or None.
        rest: has no effect.

    Returns:
        (B, T, width), and the state (B, H, D, D).
    """
    H, D = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask[:, :, None].to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (H, 3 * D)).split(D, dim=-1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    state = None
    if past_key_values is not None:
        state = past_key_values.get_linear_cache(layer.layer_idx)
    if state is not None:
        state = state.to(dtype)
    log_decay = -layer.slope_rate.flatten().to(dtype)
    o, state = linear_scan(call, q, k, v, log_decay, state)
    o = layer.norm(o.flatten(-2))
    o = layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * o)
    if past_key_values is not None:
        past_key_values.set_linear_cache(layer.layer_idx, state)
    return o, state
