"""Drop-in replacement of torch's `scaled_dot_product_attention`: a function and a switch."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled

from transformer_kernels import torch_private
from transformer_kernels.argument_checks import check_bool
from transformer_kernels.backends.native import extension
from transformer_kernels.dispatch import fast_path
from transformer_kernels.dispatch.autocast import cast_for_autocast
from transformer_kernels.functional.attention import attention
from transformer_kernels.integrations import torch_mha
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.checks import check_tensors
from transformer_kernels.storage import check_storage

_CAUSAL = Mask.causal()
_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


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
        if fast_o is not None:
            return fast_o
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
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Returns the result of a plain call by the fast path; None for any other call."""
    if (
        type(dropout_p) is not float
        or dropout_p != 0.0
        or type(is_causal) is not bool
        or type(enable_gqa) is not bool
    ):
        return None
    mask = _CAUSAL if is_causal else None
    if attn_mask is not None:
        if type(attn_mask) is not Tensor or attn_mask.dtype is not torch.bool:
            return None
        if query.dim() != 4 or attn_mask.dim() > 4:
            return None
        dense = Mask.dense(attn_mask)
        mask = dense & _CAUSAL if is_causal else dense
    return fast_path.attend(query, key, value, mask, scale, enable_gqa)


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
    if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
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


@dataclass
class _Switch:
    """The state of the replacement in this process. The lock protects every change."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    on: bool = False
    by_enable: bool = False
    blocks: int = 0
    """`enabled()` blocks that are open, in all threads."""
    library: torch.library.Library | None = None
    graph_cache: bool = True


_SWITCH = _Switch()


def enable() -> None:
    """Replaces torch's `scaled_dot_product_attention` on the CPU by these kernels, in all threads.

    The replacement applies to every caller: training, dropout, `nn.MultiheadAttention`, code that
    imported the function earlier, and compiled functions, which are compiled again. A call that
    these kernels do not support runs torch's implementation, with a warning that gives the reason;
    inside `torch.nn.attention.sdpa_kernel` without FLASH_ATTENTION, every call does. `disable()`
    undoes the replacement. A second call has no effect. docs/drop-in.md has the details.

    Raises:
        RuntimeError: the compiled extension is not available, or this torch release lacks a private
            symbol that the replacement needs.
    """
    _check_available()
    with _SWITCH.lock:
        _SWITCH.by_enable = True
        _update()


def disable() -> None:
    """Undoes `enable()`. torch's own attention is back once no `enabled()` block is open."""
    with _SWITCH.lock:
        _SWITCH.by_enable = False
        _update()


@contextmanager
def enabled() -> Iterator[None]:
    """Context manager: the replacement is in effect until the last such block of all threads ends.

    Raises:
        RuntimeError: as for `enable`.
    """
    _check_available()
    with _SWITCH.lock:
        _SWITCH.blocks += 1
        _update()
    try:
        yield
    finally:
        with _SWITCH.lock:
            _SWITCH.blocks -= 1
            _update()


def _check_available() -> None:
    unavailable = extension.unavailable_reason()
    if unavailable is not None:
        raise RuntimeError(f"enable() needs the CPU kernels, but {unavailable}")
    if torch_private.MISSING_FOR_SDPA:
        missing = ", ".join(torch_private.MISSING_FOR_SDPA)
        raise RuntimeError(f"enable() needs {missing}, which torch {torch.__version__} lacks")


def _update() -> None:
    """Turns the replacement on or off. The caller holds the lock."""
    wanted = _SWITCH.by_enable or _SWITCH.blocks > 0
    if wanted == _SWITCH.on:
        return
    if wanted:
        _register()
        # The on-disk graph cache is keyed by operator names: it would return torch's graphs.
        _SWITCH.graph_cache = torch_private.set_graph_cache(False)
        torch_mha.replace()
        _SWITCH.on = True
    else:
        _SWITCH.on = False
        torch_mha.restore()
        torch_private.set_graph_cache(_SWITCH.graph_cache)
        _unregister_if_alone()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code inlines the implementation


def _register() -> None:
    if _SWITCH.library is None:
        library = torch.library.Library("aten", "IMPL")
        for key in ("CPU", "AutogradCPU"):
            library.impl("scaled_dot_product_attention", _replacement, key)
        _SWITCH.library = library
        torch_private.forget_kernel(_OPERATOR)


def _unregister_if_alone() -> None:
    """Unregisters the replacement if this is the only thread.

    Calls of another thread may be inside torch's dispatcher, without the GIL: unregistering would
    free the kernel that they are about to call. The replacement then stays, and calls torch's
    implementation.
    """
    if _SWITCH.library is not None and len(sys._current_frames()) == 1:
        torch_private.remove_library(_SWITCH.library)
        _SWITCH.library = None
        torch_private.forget_kernel(_OPERATOR)


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
    refusal: Exception | None = None
    if _SWITCH.on and flash_sdp_enabled():
        try:
            fast_o = _fast_path(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
            if fast_o is not None:
                return fast_o
            return _general_path(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        except (TypeError, ValueError) as error:
            refusal = error
    o: Tensor = torch_private.call_composite(
        _OPERATOR,
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    if refusal is not None:
        warnings.warn(f"falling back to torch's own attention: {refusal}", stacklevel=2)
    return o
