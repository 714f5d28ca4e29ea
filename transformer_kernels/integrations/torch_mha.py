"""Inference fast paths of torch's transformer modules, computed by these kernels.

In evaluation mode without gradients, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call
one operator that holds its own attention, and it alone supports nested tensors. `replace` puts
functions with the operators' signatures in their place. They call
`torch.nn.functional.scaled_dot_product_attention`, or `attention_varlen` for nested tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled
from torch.nn import functional

from ..common import torch_private
from ..dispatch.division import check_undivided
from ..functional.varlen import attention_varlen
from ..problem.checks import DTYPES
from . import torch_devices

Lengths = list[int] | None
"""Lengths of packed sequences; None for a padded batch."""

_MHA = torch_private.native_multi_head_attention
_LAYER = torch_private.transformer_encoder_layer


def replace() -> None:
    """Makes torch's modules call the functions of this file."""
    torch_private.set_module_fast_paths(_multi_head_attention, _encoder_layer)


def restore() -> None:
    """Makes torch's modules call torch's operators."""
    torch_private.set_module_fast_paths(_MHA, _LAYER)


class _Weights(NamedTuple):
    """Parameters of one multi-head attention: qkv_weight (3 E, E), proj_weight (E, E)."""

    num_heads: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Signature of torch's `_native_multi_head_attention`."""
    if need_weights or not _supports(query, mask) or query is not key or key is not value:
        check_undivided("torch's own attention")
        o, weights = _MHA(
            query, key, value, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
            mask, need_weights, average_attn_weights, mask_type,
        )  # fmt: skip
        return o, weights
    weights = _Weights(num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
    attn_mask = _attn_mask(mask, mask_type)
    return _packed(query, lambda x, lengths: _attend(x, lengths, attn_mask, weights)), None


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Signature of torch's `_transformer_encoder_layer_fwd`."""
    if not _supports(src, mask):
        check_undivided("torch's own attention")
        o: Tensor = _LAYER(
            src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
            norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1,
            ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type,
        )  # fmt: skip
        return o
    weights = _Weights(num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
    attn_mask = _attn_mask(mask, mask_type)
    activation = functional.gelu if use_gelu else functional.relu

    def norm_1(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = activation(functional.linear(x, ffn_weight_1, ffn_bias_1))
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def layer(x: Tensor, lengths: Lengths) -> Tensor:
        if norm_first:
            x = x + _attend(norm_1(x), lengths, attn_mask, weights)
            return x + feed_forward(norm_2(x))
        x = norm_1(x + _attend(x, lengths, attn_mask, weights))
        return norm_2(x + feed_forward(x))

    return _packed(src, layer)


def _supports(x: Tensor, mask: Tensor | None) -> bool:
    """True if these kernels compute the call; torch's operator does otherwise."""
    if not (x.device.type in torch_devices.REPLACED and x.dtype in DTYPES):
        return False
    # Dynamo cannot trace the setting; scaled_dot_product_attention heeds it in compiled code.
    if not torch.compiler.is_compiling() and not flash_sdp_enabled():
        return False
    return not x.is_nested or (mask is None and x.size(0) > 0)


def _packed(x: Tensor, function: Callable[[Tensor, Lengths], Tensor]) -> Tensor:
    """Applies a function of (x, lengths) to x (B, M, E) or, if x is nested, to (total, E)."""
    if not x.is_nested:
        return function(x, None)
    sequences = x.unbind()
    lengths = [sequence.shape[0] for sequence in sequences]
    y = function(torch.cat(sequences), lengths)
    return torch.nested.as_nested_tensor(list(y.split(lengths)))


def _attend(x: Tensor, lengths: Lengths, attn_mask: Tensor | None, weights: _Weights) -> Tensor:
    """Computes self-attention of x (B, M, E), or (total, E) with lengths."""
    qkv = functional.linear(x, weights.qkv_weight, weights.qkv_bias)
    qkv = qkv.unflatten(-1, (3, weights.num_heads, -1))
    if lengths is not None:
        q, k, v = qkv.unbind(1)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=x.device)
        o = attention_varlen(q, k, v, cu_seqlens, max_seqlen_q=max(lengths)).flatten(1)
    else:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask).transpose(1, 2).flatten(2)
    return functional.linear(o, weights.proj_weight, weights.proj_bias)


def _attn_mask(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Converts the operators' mask to that of scaled_dot_product_attention.

    bool: True = hidden. Floating point: added to the scores. mask_type 1: (B, M); else
    broadcastable to (B, H, M, M).
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = ~mask
    return mask[:, None, None] if mask_type == 1 else mask
