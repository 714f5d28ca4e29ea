"""torch's own `scaled_dot_product_attention`, by our kernels: as a function, and as a switch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_kernels import torch_private
from transformer_kernels.backends.native import extension
from transformer_kernels.dispatch import fast_path
from transformer_kernels.functional.attention import attention
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.checks import DTYPES

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
    """`torch.nn.functional.scaled_dot_product_attention`, argument for argument.

    Args:
        query: (..., H_q, M, D) or (M, D); leading dimensions broadcast against key's and value's.
        key: (..., H_kv, N, D).
        value: (..., H_kv, N, D_v).
        attn_mask: broadcastable to (..., H_q, M, N); bool: True = take part; float: added to the
            scores, differentiable.
        dropout_p: applied whenever it is not 0, in evaluation too, as torch does.
        is_causal: top-left aligned; excludes `attn_mask`.
        scale: 1/sqrt(D) unless given.
        enable_gqa: allow H_q to be a multiple of H_kv.

    Returns:
        (..., H_q, M, D_v). Rows that see no key are 0.
    """
    plain_o = _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if plain_o is not None:
        return plain_o
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None when is_causal=True, got a mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have 2 dimensions or more, got {tuple(x.shape)}")
    if not enable_gqa and query.dim() > 2 and _heads(query) != _heads(key) and 1 not in (
        _heads(query), _heads(key)
    ):  # fmt: skip
        raise ValueError(
            f"query has {_heads(query)} heads and key {_heads(key)}; "
            "enable_gqa=True allows a multiple"
        )
    lead, (q, k, v) = _four_dimensional(query, key, value, enable_gqa)
    mask, bias = _mask_or_bias(attn_mask, lead, q, k)
    if is_causal:
        mask = _CAUSAL
    o = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    return o.reshape(*lead, *o.shape[-2:])


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """The result of a call that can go straight to the kernels; None for any other."""
    if type(dropout_p) is not float or dropout_p != 0.0:
        return None
    mask = _CAUSAL if is_causal else None
    if attn_mask is not None:
        if is_causal or type(attn_mask) is not Tensor or attn_mask.dtype is not torch.bool:
            return None
        if query.dim() != 4 or attn_mask.dim() > 4:
            return None
        mask = Mask.dense(attn_mask)
    return fast_path.attend(query, key, value, mask, scale, enable_gqa)


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """The output's leading dimensions, and q, k, v as (B, H, length, width)."""
    dims = 3 if enable_gqa else 2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-dims] for x in (query, key, value)))
    except RuntimeError as error:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"the leading dimensions must broadcast, got {shapes}") from error
    q, k, v = (x.expand(*lead, *x.shape[-dims:]) for x in (query, key, value))
    lead = tuple(q.shape[:-2])
    return lead, (_to_four(q), _to_four(k), _to_four(v))


def _to_four(x: Tensor) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]


def _mask_or_bias(
    attn_mask: Tensor | None, lead: tuple[int, ...], q: Tensor, k: Tensor
) -> tuple[Mask | None, Tensor | None]:
    if attn_mask is None:
        return None, None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if len(lead) > 2:
        attn_mask = attn_mask.expand(*lead, q.shape[-2], k.shape[-2])
    shown = _to_four(attn_mask)
    if shown.dtype == torch.bool:
        return Mask.dense(shown), None
    return None, shown


@dataclass
class _Switch:
    """What `enable` changed, so that `disable` can put it back."""

    library: torch.library.Library | None = None
    fast_path: bool = True
    graph_cache: bool = True


_SWITCH = _Switch()


def enable() -> None:
    """Puts the kernels behind torch's own attention on the CPU, until `disable()`.

    `F.scaled_dot_product_attention` then runs ours wherever it is called from: training, dropout,
    `nn.MultiheadAttention`, code that imported the function earlier, functions compiled afterwards
    (those compiled before are compiled again). A call that our kernels cannot take goes to torch's
    own path with a warning that says why. Calling it twice changes nothing.

    Raises RuntimeError when the extension is not available, or this torch lacks a private symbol
    that is needed.
    """
    if _SWITCH.library is not None:
        return
    unavailable = extension.unavailable_reason()
    if unavailable is not None:
        raise RuntimeError(f"enable() needs the CPU kernels, but {unavailable}")
    if torch_private.MISSING_FOR_SDPA:
        missing = ", ".join(torch_private.MISSING_FOR_SDPA)
        raise RuntimeError(f"enable() needs {missing}, which torch {torch.__version__} lacks")
    library = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "AutogradCPU"):
        library.impl("scaled_dot_product_attention", _replacement, key)
    _SWITCH.library = library
    # In evaluation nn.MultiheadAttention would otherwise take a fused path of its own.
    _SWITCH.fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # Its cache on disk knows graphs by torch's names alone, and would return those of torch's own.
    _SWITCH.graph_cache = torch_private.set_graph_cache(False)
    _forget_compiled()


def disable() -> None:
    """Gives torch its own attention back. Does nothing when `enable` is not in force."""
    if _SWITCH.library is None:
        return
    torch_private.remove_library(_SWITCH.library)
    _SWITCH.library = None
    torch.backends.mha.set_fastpath_enabled(_SWITCH.fast_path)
    torch_private.set_graph_cache(_SWITCH.graph_cache)
    _forget_compiled()


@contextmanager
def enabled() -> Iterator[None]:
    """`enable()` inside the with block; what was in force before it comes back after it."""
    was_enabled = _SWITCH.library is not None
    enable()
    try:
        yield
    finally:
        if not was_enabled:
            disable()


def _forget_compiled() -> None:
    """Makes torch look the operator up again, and compile again what has the old one inlined."""
    torch_private.forget_kernel(torch.ops.aten.scaled_dot_product_attention.default)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _replacement(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain_o = _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if plain_o is not None:
        return plain_o
    reason = _why_not(query, key, value, enable_gqa)
    if reason is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    warnings.warn(f"torch's own attention runs: {reason}", stacklevel=2)
    o: Tensor = torch_private.call_composite(
        torch.ops.aten.scaled_dot_product_attention.default,
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    return o


def _why_not(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if 0 in query.shape[-1:] + value.shape[-1:] + query.shape[-3:-2]:
        return "a width of 0, or no heads"
    if enable_gqa and _heads(key) != _heads(value):
        return "key and value with different numbers of heads"
    return None
