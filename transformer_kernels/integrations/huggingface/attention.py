"""The attention function: HuggingFace's interface -> `attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...common.argument_checks import shown
from ...dispatch.division import check_undivided
from ...functional.attention import attention
from ...masks.mask import Mask
from .divided import current_division, divided_documents
from .int8_states import Int8States, attention_to_int8
from .lazy_mask import LazyMask
from .models import is_passed_by
from .packing import mask_of_lengths, mask_of_positions

_CAUSAL = Mask.causal()

_WITHOUT_EFFECT = frozenset(
    ("sliding_window", "max_length_q", "max_length_k", "seq_idx", "deterministic", "use_cache")
)
"""Arguments that modules pass and that do not change the result: masks have the windows."""

_OF_CONTINUOUS_BATCHING = ("cache", "block_table")
"""Arguments of the model's call that attention must not ignore."""


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
    packed_documents: Tensor | None = None,
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
        packed_documents: what a model with linear layers found, like `cu_seq_lens_q`. It counts if
            there are neither those nor position_ids, and M = N.
        indices: integers (B, M, count): the keys that each query sees, of those that are visible.
        block_indices: integers (B, groups, M, count): the blocks of `module.indexer.block_size`
            keys that each query sees in a group of heads; -1 = none.
        output_attentions: not supported.
        rest: arguments of the model's call, which have no effect, as in "eager".

    Returns:
        (B, M, H_q, D_v), contiguous, and None in place of the attention weights.

    Raises:
        ValueError: output_attentions is set; the module passes an argument that is not known here;
            the mask of a causal module with M != N is None; or as for `attention`.
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
            _check_has_no_effect(module, name, argument)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = _with_one_batch(query, key, value)
    size = query.shape[0], query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    mask, bias = _mask_and_bias(module, attention_mask, size, is_causal)
    if cu_seq_lens_q is not None:
        documents = _documents_by_length(cu_seq_lens_q, cu_seq_lens_k, size, is_causal)
        mask = _both(mask, documents)
    elif position_ids is not None and is_causal and getattr(attention_mask, "may_be_packed", False):
        mask = _both(mask, _documents_by_position(position_ids, attention_mask, size[0]))
    elif packed_documents is not None and position_ids is None and size[1] == size[2]:
        mask = _both(mask, mask_of_lengths(packed_documents, None, *size, is_causal=is_causal))
    if indices is not None or block_indices is not None:
        mask = _both(mask, _chosen_keys(module, indices, block_indices, query.shape[1]))
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype is not torch.float32:
        bias = bias.to(query.dtype)
    options: dict[str, Any] = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap,
        "dropout_p": float(dropout), "sinks": s_aux,
    }  # fmt: skip
    if sinks is None:
        o = _attend(query, key, value, **options)
    else:  # a sink takes its share of the softmax: exp(lse) / (exp(lse) + exp(sink)) remains
        o, lse = _attend(query, key, value, **options, return_lse=True)
        o = o * torch.sigmoid(lse[..., None] - sinks).to(o.dtype)
    return o.transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if isinstance(key, Int8States) and isinstance(value, Int8States):
        return attention_to_int8(query, key, value, **options)
    return attention(query, key, value, **options)


def _check_has_no_effect(module: nn.Module, name: str, argument: object) -> None:
    if name in _OF_CONTINUOUS_BATCHING or is_passed_by(type(module), name):
        raise ValueError(
            f"{type(module).__name__} passes {name}={shown(argument)} to its attention, which is "
            'not supported: use attn_implementation="eager"'
        )


def _mask_and_bias(
    module: nn.Module, attention_mask: Tensor | None, size: tuple[int, int, int], is_causal: bool
) -> tuple[Mask | None, Tensor | None]:
    B, M, N = size
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
            return None, attention_mask.dense()
        if attention_mask.shape == (B, 1, M, N):
            mask = attention_mask.mask
            return mask if mask.constraints else None, None
        return Mask.dense(attention_mask.visible()), None  # broadcast, or an error
    traced: Mask | None = getattr(attention_mask, "mask", None)
    if traced is not None:
        return traced, None
    if attention_mask.dtype == torch.bool:
        return Mask.dense(attention_mask), None
    return None, attention_mask


def _both(mask: Mask | None, other: Mask | None) -> Mask | None:
    return mask if other is None else other if mask is None else mask & other


def _documents_by_length(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, size: tuple[int, int, int], is_causal: bool
) -> Mask:
    if current_division() is not None:
        raise ValueError("cu_seq_lens_q must be None on a divided sequence: pass position_ids")
    return mask_of_lengths(cu_seq_lens_q, cu_seq_lens_k, *size, is_causal=is_causal)


def _documents_by_position(position_ids: Tensor, attention_mask: Any, B: int) -> Mask | None:
    """Returns the mask of packed documents, if there are any."""
    if position_ids.dim() != 2:
        return None
    tokens: Tensor | None = attention_mask.tokens
    if torch.compiler.is_compiling() or not isinstance(attention_mask, LazyMask):
        return mask_of_positions(position_ids, tokens, B)
    if attention_mask.documents is None or attention_mask.documents[0] is not position_ids:
        here = current_division()
        if here is None:
            found = mask_of_positions(position_ids, tokens, B)
        else:
            found = divided_documents(here, position_ids, tokens, B)
        attention_mask.documents = position_ids, found
    return attention_mask.documents[1]


def _chosen_keys(
    module: Any, indices: Tensor | None, block_indices: Tensor | None, H: int
) -> Mask | None:
    check_undivided("sparse attention")
    chosen = None if indices is None else Mask.selected(indices)
    if block_indices is None:
        return chosen
    of_heads = block_indices.repeat_interleave(H // block_indices.shape[1], dim=1)
    return _both(chosen, Mask.selected(of_heads, module.indexer.block_size))


def _with_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcasts the batch dimensions, as torch's attention does."""
    (B,) = torch.broadcast_shapes(*(x.shape[:1] for x in tensors))
    return tuple(x.expand(B, -1, -1, -1) for x in tensors)
