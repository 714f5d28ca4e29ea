"""A function with the signature and semantics of torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..common.storage import check_storage
from ..dispatch import fast_path
from ..dispatch.autocast import cast_bias, cast_for_autocast
from ..functional.attention import attention
from ..masks.mask import Mask
from ..problem.checks import check_tensors

_CAUSAL = Mask.causal()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention with the signature and semantics of torch's function of the same name.

    Args:
        query: (..., H_q, M, D) or (M, D), float16, bfloat16, float32 or float64. Leading dimensions
            broadcast with those of key and value.
        key: (..., H_kv, N, D) or (N, D), with query's dtype and device.
        value: (..., H_kv, N, D_v) or (N, D_v), with query's dtype and device.
        attn_mask: broadcastable to (..., H_q, M, N). bool: True = visible. Floating point: added to
            the scores, differentiable.
        dropout_p: dropout probability of the attention weights, from 0 to 1. As in torch, it
            applies in evaluation mode too.
        is_causal: applies a top-left aligned causal mask. With `attn_mask`, both apply.
        scale: factor of query key^T. Default: 1/sqrt(D).
        enable_gqa: allows H_q to be a multiple of H_kv.

    Returns:
        (..., H_q, M, D_v) in query's dtype. A row without a visible key is 0.

    Raises:
        ArgumentTypeError: an argument has the wrong type, layout or dtype.
        ArgumentValueError: an argument has the wrong shape, device or value.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    try:
        fast_o = _fast_path(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if type(fast_o) is Tensor:
            return fast_o
        if is_overridden(query, key, value, attn_mask):
            return overridden(
                scaled_dot_product_attention, query, key, value, attn_mask=attn_mask,
                dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        return _general_path(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except TypeError as error:
        raise ArgumentTypeError(str(error)) from error
    except ValueError as error:
        raise ArgumentValueError(str(error)) from error


class ArgumentTypeError(TypeError, NotImplementedError):
    """A TypeError that is also the NotImplementedError or RuntimeError that torch raises."""


class ArgumentValueError(ValueError, RuntimeError):
    """A ValueError that is also the RuntimeError that torch raises."""


def _fast_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: object,
    scale: float | None,
    enable_gqa: object,
) -> Tensor | str | None:
    """Returns the result of a plain call by the fast path, or the reason for any other call."""
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "is_causal or enable_gqa is no bool"
    mask = _CAUSAL if is_causal else None
    if attn_mask is not None:
        if type(attn_mask) is not Tensor or attn_mask.dtype is not torch.bool:
            return "attn_mask is a bias"
        if attn_mask.dim() > 4:
            return "attn_mask has more than 4 dimensions"
        dense = Mask.dense(attn_mask)
        mask = dense & _CAUSAL if is_causal else dense
    return fast_path.plain_attention(
        query, key, value, mask=mask, dropout_p=dropout_p, scale=scale, grouped=enable_gqa
    )


def _general_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    check_bool("is_causal", is_causal)
    check_bool("enable_gqa", enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name} must have 2 dimensions or more, got shape {tuple(x.shape)}")
    if not enable_gqa and query.dim() > 2 and _heads(query) != _heads(key) and 1 not in (
        _heads(query), _heads(key)
    ):  # fmt: skip
        raise ValueError(
            f"query has {_heads(query)} heads and key {_heads(key)}; "
            "enable_gqa=True allows a multiple"
        )
    lead, (q, k, v) = _as_4d_inputs(query, key, value, enable_gqa)
    mask, bias = _mask_or_bias(attn_mask, lead, q, k)
    if is_causal:
        mask = _CAUSAL if mask is None else mask & _CAUSAL
    try:
        o = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    except (TypeError, ValueError):
        _check_by_torchs_names(q, k, v, attn_mask, lead)
        raise
    return o.reshape(*lead, *o.shape[-2:])


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {kind}")
    check_storage(((name, x),))


def _check_by_torchs_names(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, lead: tuple[int, ...]
) -> None:
    """Raises the errors of `attention` that concern tensors, with torch's names of the arguments.

    Called only after `attention` has refused the arguments, so that other calls do not pay for it.
    """
    q, k, v = cast_for_autocast(q, k, v)
    check_tensors(q, k, v, names=("query", "key", "value"))
    if attn_mask is None:
        return
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device}, query is on {q.device}")
    if cast_bias(attn_mask, q).dtype not in (torch.bool, torch.float32, q.dtype):
        raise TypeError(
            f"attn_mask must be torch.bool, torch.float32 or {q.dtype} (as query), "
            f"got {attn_mask.dtype}"
        )
    _check_mask_shape(attn_mask, (*lead, q.shape[-2], k.shape[-2]))


def _check_mask_shape(attn_mask: Tensor, wanted: tuple[int, ...]) -> None:
    shape = tuple(attn_mask.shape)
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    if len(shape) > len(wanted) or any(have not in (1, want) for have, want in pairs):
        raise ValueError(f"attn_mask must broadcast to (..., H_q, M, N) = {wanted}, got {shape}")


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _as_4d_inputs(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """Returns the leading dimensions of the output, and q, k, v as (B, H, length, width)."""
    dims = 3 if enable_gqa else 2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-dims] for x in (query, key, value)))
    except RuntimeError as error:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"the leading dimensions must broadcast, got {shapes}") from error
    q, k, v = (x.expand(*lead, *x.shape[-dims:]) for x in (query, key, value))
    lead = tuple(q.shape[:-2])
    return lead, (_as_4d(q), _as_4d(k), _as_4d(v))


def _as_4d(x: Tensor) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]


def _mask_or_bias(
    attn_mask: Tensor | None, lead: tuple[int, ...], q: Tensor, k: Tensor
) -> tuple[Mask | None, Tensor | None]:
    if attn_mask is None:
        return None, None
    _check_tensor("attn_mask", attn_mask)
    if len(lead) > 2 or attn_mask.dim() > len(lead) + 2:
        wanted = (*lead, q.shape[-2], k.shape[-2])
        _check_mask_shape(attn_mask, wanted)
        attn_mask = _as_4d(attn_mask.expand(wanted))
    if attn_mask.dtype == torch.bool:
        return Mask.dense(attn_mask), None
    return None, attn_mask
