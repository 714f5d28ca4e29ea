"""The attention function: HuggingFace's interface -> `attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.argument_checks import shown
from transformer_kernels.dispatch.division import check_undivided
from transformer_kernels.functional.attention import attention
from transformer_kernels.integrations.huggingface.divided import (
    current_division,
    divided_documents,
)
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask
from transformer_kernels.integrations.huggingface.packing import mask_of_lengths, mask_of_positions
from transformer_kernels.integrations.huggingface.sparse import mask_of_blocks, mask_of_keys
from transformer_kernels.masks.mask import Mask

_CAUSAL = Mask.causal()

_WITHOUT_EFFECT = frozenset(
    (
        *("sliding_window", "max_length_q", "max_length_k", "seq_idx", "deterministic"),  # in masks
        *("use_cache", "return_dict", "num_items_in_batch", "labels", "cache_position"),
        *("output_hidden_states", "output_router_logits"),
    )
)
"""Arguments that models pass on and that do not change the result of attention."""


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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the interface of `transformers.AttentionInterface`.

    Args:
        module: the calling module. Without `is_causal` its attribute of that name holds, if any.
        query: (B, H_q, M, D).
        key: (B, H_kv, N, D); H_q is a multiple of H_kv. A batch of 1 is broadcast, in query too.
        value: (B, H_kv, N, D_v).
        attention_mask: None, a mask of `create_mask`, or a tensor broadcastable to (B, H_q, M, N).
            bool: True = visible. Floating point: added to the scores. None: causal if `is_causal`
            and M > 1, else every key is visible.
        dropout: dropout probability of the attention weights.
        scaling: factor of query key^T. Default: 1/sqrt(D).
        is_causal: overrides that of the module.
        softcap: bound of the scores, as in `attention`.
        s_aux: attention sinks (H_q,).
        sinks: attention sinks of each query, (B, H_q, M, 1).
        position_bias: added to the scores, broadcastable to (B, H_q, M, N).
        position_ids: integers (B or 1, M). In a causal module, positions that go back to their
            start separate packed documents, if the model was called on complete sequences.
        cu_seq_lens_q: int32 (documents + 1): boundaries of packed documents, in the rows of the
            batch one after the other. Each row starts a document.
        cu_seq_lens_k: the same for the keys. Default: `cu_seq_lens_q`, if M = N.
        indices: integers (B, M, count): the keys that each query sees, of those that are visible.
        block_indices: integers (B, groups, M, count): the blocks of `module.indexer.block_size`
            keys that each query sees in a group of heads; -1 = none.
        output_attentions: not supported.
        rest: arguments that are None or do not change the result.

    Returns:
        (B, M, H_q, D_v), contiguous, and None in place of the attention weights.

    Raises:
        ValueError: output_attentions is set; another argument is not supported; the mask of a
            causal module with M != N is None; or as for `attention`.
        TypeError: as for `attention`.

    Source: `transformers.integrations.sdpa_attention.sdpa_attention_forward`.
    """
    if output_attentions:
        raise ValueError(
            'output_attentions=True needs attn_implementation="eager": fused attention does not '
            "compute the weights"
        )
    for name, argument in rest.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{type(module).__name__} passes {name}={shown(argument)} to its attention, which "
                'these kernels do not support: use attn_implementation="eager"'
            )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = _with_one_batch(query, key, value)
    B, M, N = query.shape[0], query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    mask, bias = _mask_and_bias(module, attention_mask, (B, 1, M, N), is_causal)
    parts = [mask]
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q, cu_seq_lens_k
        parts.append(_documents_by_length(*lengths, (B, M, N), is_causal))
    elif (
        position_ids is not None
        and position_ids.dim() == 2
        and is_causal
        and M == N
        and (attention_mask is None or getattr(attention_mask, "may_be_packed", False))
    ):
        parts.append(_documents_by_position(position_ids, B))
    if indices is not None:
        check_undivided("sparse attention")
        parts.append(mask_of_keys(indices, N))
    if block_indices is not None:
        check_undivided("sparse attention")
        size: Any = module.indexer.block_size  # type: ignore[union-attr]
        parts.append(mask_of_blocks(block_indices, size, query.shape[1], N))
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(query.dtype)
    options: dict[str, Any] = {
        "mask": _all(parts), "bias": bias, "scale": scaling, "softcap": softcap,
        "dropout_p": float(dropout), "sinks": s_aux,
    }  # fmt: skip
    if sinks is None:
        o = attention(query, key, value, **options)
    else:  # a sink takes its share of the softmax: exp(lse) / (exp(lse) + exp(sink)) remains
        o, lse = attention(query, key, value, **options, return_lse=True)
        o = o * torch.sigmoid(lse[..., None] - sinks).to(o.dtype)
    return o.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    module: nn.Module, attention_mask: Tensor | None, size: tuple[int, ...], is_causal: bool
) -> tuple[Mask | None, Tensor | None]:
    _, _, M, N = size
    if attention_mask is None:
        if not is_causal or (M == 1 and current_division() is None):
            return None, None
        if M != N:
            raise ValueError(
                f"attention_mask must be given for {M} queries and {N} keys of a causal module, "
                f"got None in {type(module).__name__}"
            )
        return _CAUSAL, None
    if isinstance(attention_mask, LazyMask):
        if attention_mask.is_changed:
            return None, attention_mask.values()
        if attention_mask.shape == size:
            return attention_mask.mask, None
        return Mask.dense(attention_mask.visible()), None  # broadcast, or an error
    mask: Mask | None = getattr(attention_mask, "mask", None)  # of a traced graph
    if mask is not None:
        return mask, None
    if attention_mask.dtype == torch.bool:
        return Mask.dense(attention_mask), None
    return None, attention_mask


def _all(parts: list[Mask | None]) -> Mask | None:
    whole = None
    for part in parts:
        if part is not None:
            whole = part if whole is None else whole & part
    return whole


def _documents_by_position(position_ids: Tensor, B: int) -> Mask | None:
    """Returns the mask of packed documents, if there are any."""
    here = current_division()
    if here is None:
        return mask_of_positions(position_ids, B)
    divided: Mask | None = divided_documents(here, position_ids, B)
    return divided


def _documents_by_length(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, size: tuple[int, int, int], is_causal: bool
) -> Mask:
    if current_division() is not None:
        raise ValueError("cu_seq_lens_q must be None on a divided sequence: pass position_ids")
    return mask_of_lengths(cu_seq_lens_q, cu_seq_lens_k, *size, is_causal=is_causal)


def _with_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcasts the batch dimensions, as torch's attention does."""
    (B,) = torch.broadcast_shapes(*(x.shape[:1] for x in tensors))
    return tuple(x.expand(B, -1, -1, -1) for x in tensors)
