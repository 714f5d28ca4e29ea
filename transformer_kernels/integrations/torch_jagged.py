"""`scaled_dot_product_attention` of torch's jagged nested tensors, computed by `attention_varlen`.

torch has no kernel for them on CPUs: there it computes M x N scores, and no causal attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled

from ..common import torch_private
from ..dispatch.division import check_undivided
from ..functional.varlen import attention_varlen
from ..masks.mask import Mask
from . import torch_devices

_CAUSAL = Mask.causal()
_torchs: Callable[..., Tensor] = torch_private.jagged_attention


def replace() -> None:
    """Makes nested tensors call the function of this file, if torch has the symbols for it."""
    if not torch_private.MISSING_FOR_JAGGED:
        torch_private.set_jagged_attention(_attention)


def restore() -> None:
    """Makes nested tensors call torch's function."""
    if not torch_private.MISSING_FOR_JAGGED:
        torch_private.set_jagged_attention(_torchs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Signature of torch's `jagged_scaled_dot_product_attention`: (B, H, lengths, width)."""
    check_undivided("attention of nested tensors")
    if not _supports(query, key, value, attn_mask, enable_gqa):
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (B, lengths, H, D)
    max_q, max_k = map(torch_private.longest_of, (q, k))
    try:
        o = attention_varlen(
            q.values(), k.values(), v.values(), q.offsets(), k.offsets(),  # type: ignore[attr-defined]
            max_seqlen_q=max_q, max_seqlen_k=max_k,
            mask=_CAUSAL if is_causal else None, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
    except (TypeError, ValueError) as refusal:
        o = _torchs(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        warnings.warn(f"falling back to torch's own attention: {refusal}", stacklevel=2)
        return o
    # torch.nested.nested_tensor_from_jagged calls the same function, but cannot be compiled.
    view = torch_private.jagged_view(o, q.offsets(), None, max_seqlen=max_q)  # type: ignore[attr-defined]
    jagged: Tensor = view.transpose(1, 2)
    return jagged


def _supports(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> bool:
    """True if these kernels compute the call; torch's function, or its error, comes otherwise."""
    # Dynamo cannot trace the setting.
    if not torch.compiler.is_compiling() and not flash_sdp_enabled():
        return False
    if attn_mask is not None or query.device.type not in torch_devices.REPLACED:
        return False
    if not all(map(_is_packed, (query, key, value))):
        return False
    if not enable_gqa and query.shape[1] != key.shape[1]:
        return False
    return query.shape[0] == key.shape[0] and key.shape[2] == value.shape[2]


def _is_packed(x: Tensor) -> bool:
    """True for a jagged tensor (B, H, lengths, width) without gaps between its sequences."""
    return (
        x.is_nested
        and x.layout is torch.jagged
        and x.dim() == 4
        and torch_private.ragged_dimension(x) == 2
        and x.lengths() is None  # type: ignore[attr-defined]
    )
