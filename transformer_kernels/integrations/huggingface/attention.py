"""The attention function: HuggingFace's interface -> `attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.functional.attention import attention
from transformer_kernels.integrations.huggingface.divided import (
    current_division,
    divided_documents,
)
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask
from transformer_kernels.integrations.huggingface.packing import mask_of_lengths, mask_of_positions
from transformer_kernels.masks.mask import Mask

_CAUSAL = Mask.causal()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the interface of `transformers.AttentionInterface`.

    Args:
        module: the calling module; its `is_causal` (default True) holds without that argument.
        query: (B, H_q, M, D).
        key: (B, H_kv, N, D); H_q is a multiple of H_kv. A batch of 1 is broadcast, in query too.
        value: (B, H_kv, N, D_v).
        attention_mask: None, a `LazyMask`, or a tensor broadcastable to (B, H_q, M, N). bool: True
            = visible. Floating point: added to the scores. None: causal if `is_causal` and M > 1.
        dropout: dropout probability of the attention weights.
        scaling: factor of query key^T. Default: 1/sqrt(D).
        is_causal: overrides that of the module.
        softcap: bound of the scores, as in `attention`.
        s_aux: attention sinks (H_q,).
        position_bias: added to the scores, broadcastable to (B, H_q, M, N).
        position_ids: integers (B or 1, M). If the model was called without a padding mask on
            complete sequences, positions that start again separate packed documents.
        cu_seq_lens_q: int32 (documents + 1): boundaries of documents packed into a batch of 1.
        output_attentions: not supported.

    Returns:
        (B, M, H_q, D_v), contiguous, and None in place of the attention weights.

    Raises:
        ValueError: output_attentions is set, or as for `attention`.
        TypeError: as for `attention`.

    Source: `transformers.integrations.sdpa_attention.sdpa_attention_forward`.
    """
    if output_attentions:
        raise ValueError(
            'output_attentions=True needs attn_implementation="eager": fused attention does not '
            "compute the weights"
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = _with_one_batch(query, key, value)
    B, M, N = query.shape[0], query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_sequence = M > 1 or current_division() is not None
    mask, bias = _mask_and_bias(attention_mask, (B, 1, M, N), is_causal and is_sequence)
    if M == N and is_sequence:
        may_be_packed = attention_mask is None or getattr(attention_mask, "may_be_packed", False)
        documents = _documents(
            cu_seq_lens_q, position_ids if is_causal and may_be_packed else None, B, M
        )
        if documents is not None:
            mask = documents if mask is None else mask & documents
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(query.dtype)
    o = attention(
        query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap,
        dropout_p=float(dropout), sinks=s_aux,
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    attention_mask: Tensor | None, size: tuple[int, ...], is_causal: bool
) -> tuple[Mask | None, Tensor | None]:
    if attention_mask is None:
        return _CAUSAL if is_causal else None, None
    if isinstance(attention_mask, LazyMask):
        if attention_mask.shape == size:
            return attention_mask.mask, None
        return Mask.dense(attention_mask.dense()), None  # broadcast, or an error
    if attention_mask.dtype == torch.bool:
        return Mask.dense(attention_mask), None
    return None, attention_mask


def _documents(
    cu_seq_lens_q: Tensor | None, position_ids: Tensor | None, B: int, M: int
) -> Mask | None:
    """Returns the mask of packed documents, if there are any."""
    here = current_division()
    if cu_seq_lens_q is not None:
        if here is not None:
            raise ValueError("cu_seq_lens_q must be None on a divided sequence: pass position_ids")
        return mask_of_lengths(cu_seq_lens_q, M)
    if position_ids is None or position_ids.dim() != 2:
        return None
    if here is None:
        return mask_of_positions(position_ids, B)
    divided: Mask | None = divided_documents(here, position_ids, B)
    return divided


def _with_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcasts the batch dimensions, as torch's attention does."""
    (B,) = torch.broadcast_shapes(*(x.shape[:1] for x in tensors))
    return tuple(x.expand(B, -1, -1, -1) for x in tensors)
