"""`flash_attn.flash_attn_interface`: the public functions, and the internal ones with which other
packages write derivatives of their own, such as those for divided sequences.

Examples:
    >>> out, softmax_lse, _, rng_state = _flash_attn_forward(
    ...     q, k, v, 0.0, scale, causal=True, window_size_left=-1, window_size_right=-1,
    ...     softcap=0.0, alibi_slopes=None, return_softmax=False)

The internal functions have no derivative, and autocast has no effect on them. The backward ones
take the weights exp(s - softmax_lse) from the arguments, not from a forward pass of theirs: with
out and softmax_lse of all keys, the gradients of parts of the keys add up to those of all.

Source: flash_attn 2.8.4; Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends import BACKENDS
from ...common.argument_checks import check_int, check_number, check_tensor, shown
from ...common.storage import check_storage
from ...dispatch import partial
from ...dispatch.autocast import without_autocast
from ...dispatch.choose import choose
from ...functional.attention import attention
from ...functional.varlen import attention_varlen
from ...problem import Problem, Saved
from ...problem.dense import dense_problem
from ...problem.types import accumulate_dtype
from ...problem.varlen import one_entry, varlen_problem
from ...scores.options import drawn_seed
from ..paged_varlen import attend_pages
from . import *  # noqa: F403
from . import __all__ as _public
from .arguments import (
    Options,
    as_int,
    check_deterministic,
    check_dimensions,
    check_packed,
    score_options,
    warn_of_probabilities,
)

__all__ = [
    *_public,
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Computes what `flash_attn_func` returns, and what its backward pass needs.

    Arguments are those of `flash_attn_func`, with a window of two arguments. return_softmax warns
    that the third result is None.

    Returns:
        out (batch, seqlen_q, heads, headdim_v) in q's dtype; softmax_lse (batch, heads, seqlen_q)
        in float32 (float64 for float64 inputs), natural logarithm, -inf for a query without a
        visible key; None in place of the probabilities; and rng_state, int64 (), the seed of
        dropout, drawn from torch's generator if dropout_p > 0.

    Raises:
        TypeError, ValueError: as in `flash_attn_func`.
    """
    options = _options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dimensions(name, x, "batch, seqlen, heads, headdim")
    rng_state = _drawn(dropout_p, return_softmax, q)
    q, k, v = map(_heads_first, (q, k, v))
    with torch.no_grad(), without_autocast(q.device.type):
        o, lse = attention(q, k, v, dropout_p=dropout_p, seed=rng_state, **options, return_lse=True)
    return o.transpose(1, 2), lse, None, rng_state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Computes what `flash_attn_varlen_func` returns, and what its backward pass needs.

    Arguments are those of `flash_attn_varlen_func` and `_flash_attn_forward`. leftpad_k and
    seqused_k are None; num_splits and zero_tensors have no effect: rows after the last sequence are
    always 0.

    Returns:
        out (total_q, heads, headdim_v), softmax_lse (heads, total_q), None and rng_state, otherwise
        as in `_flash_attn_forward`.

    Raises:
        TypeError: as in `flash_attn_varlen_func`.
        ValueError: as there; leftpad_k or seqused_k is given.
    """
    for name, x in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if x is not None:
            raise ValueError(f"{name} must be None, got {shown(x)}")
    options = _options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    )
    check_packed(q, k, v, block_table)
    rng_state = _drawn(dropout_p, return_softmax, q)
    given: dict[str, Any] = {
        "max_seqlen_q": as_int(max_seqlen_q), "max_seqlen_k": as_int(max_seqlen_k),
        "dropout_p": dropout_p, "seed": rng_state, **options,
    }  # fmt: skip
    with torch.no_grad(), without_autocast(q.device.type):
        if block_table is None:
            o, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given, return_lse=True)
        else:
            o, lse = attend_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, **given)
    return o, lse, None, rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Computes the gradients of `_flash_attn_forward`, by out and softmax_lse as they are given.

    Args:
        dout: gradient of out, in its shape and dtype.
        q: (batch, seqlen_q, heads, headdim); any strides, like the other tensors.
        k: (batch, seqlen_k, heads_k, headdim), all keys or a part of them.
        v: (batch, seqlen_k, heads_k, headdim_v).
        out: (batch, seqlen_q, heads, headdim_v), the output over all keys, in q's dtype.
        softmax_lse: the log-sum-exp over all keys, as `_flash_attn_forward` returns it.
        dq: is overwritten with the gradient of q, in its shape and dtype; None drops it.
        dk: likewise with that of k.
        dv: likewise with that of v.
        dropout_p: as in `flash_attn_func`, like the arguments up to `deterministic`.
        softmax_scale: see there.
        causal: see there.
        window_size_left: see there.
        window_size_right: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        rng_state: that of the forward pass; None without dropout.

    Returns:
        softmax_d (batch, heads, seqlen_q) in softmax_lse's dtype: dout * out, summed over the
        width.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.
    """
    options = _options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dimensions(name, x, "batch, seqlen, heads, headdim")
    seed = _given(rng_state, dropout_p, q)
    gradients = {"q": dq, "k": dk, "v": dv}
    with torch.no_grad():
        problem = dense_problem(
            *map(_heads_first, (q, k, v)), dropout_p=dropout_p, seed=seed, **options
        )
        return _write_gradients(problem, dout, q, k, v, out, softmax_lse, gradients, deterministic)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Computes the gradients of `_flash_attn_varlen_forward`, by out and softmax_lse as given.

    Arguments are those of `_flash_attn_backward` and `flash_attn_varlen_func`. Gradients of rows
    after the last sequence are 0; zero_tensors has no effect.

    Returns:
        softmax_d (heads, total_q), otherwise as in `_flash_attn_backward`.

    Raises:
        TypeError, ValueError: as in `_flash_attn_backward`.
    """
    options = _options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    )
    check_packed(q, k, v)
    seed = _given(rng_state, dropout_p, q)
    gradients = {"q": dq, "k": dk, "v": dv}
    with torch.no_grad():
        problem = varlen_problem(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=as_int(max_seqlen_q),
            max_seqlen_k=as_int(max_seqlen_k), dropout_p=dropout_p, seed=seed, **options,
        )  # fmt: skip
        return _write_gradients(problem, dout, q, k, v, out, softmax_lse, gradients, deterministic)


def _options(
    softmax_scale: float | None,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Options:
    check_int("window_size_left", left)
    check_int("window_size_right", right)
    return score_options(softmax_scale, causal, (left, right), softcap, alibi_slopes)


def _drawn(dropout_p: float, return_softmax: bool, q: Tensor) -> Tensor:
    """Returns rng_state of a forward pass; 0 without dropout, which leaves the generator alone."""
    if return_softmax:
        warn_of_probabilities("return_softmax")
    if check_number("dropout_p", dropout_p) == 0.0:
        return torch.zeros((), dtype=torch.int64, device=q.device)
    return drawn_seed(q.device)


def _given(rng_state: Tensor | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """Returns the seed of a backward pass; None without dropout."""
    if check_number("dropout_p", dropout_p) == 0.0:
        return None
    if rng_state is None:
        raise ValueError(
            f"rng_state must be that of the forward pass with dropout_p = {dropout_p}, got None"
        )
    _check_like("rng_state", rng_state, (), torch.int64, q.device)
    return rng_state


def _write_gradients(
    problem: Problem,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: dict[str, Tensor | None],
    deterministic: bool,
) -> Tensor:
    """Writes the gradients that are not None, by the names of their inputs; returns softmax_d."""
    is_packed, dtype = problem.kind == "varlen", accumulate_dtype(q.dtype)
    check_deterministic(deterministic and q.is_cuda)
    heads_first = one_entry if is_packed else _heads_first
    rows = heads_first(q).shape[:3]
    for name, x in (("dout", dout), ("out", out)):
        _check_like(name, x, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    _check_like("softmax_lse", lse, rows[1:] if is_packed else rows, dtype, q.device)
    written = {name: x for name, x in gradients.items() if x is not None}
    for name, x in written.items():
        _check_like(f"d{name}", x, {"q": q, "k": k, "v": v}[name].shape, q.dtype, q.device)
    o, do = heads_first(out), heads_first(dout)
    row_stats = torch.stack((lse, torch.zeros_like(lse))).view(2, *rows)
    saved = Saved(heads_first(q), heads_first(k), heads_first(v), o, row_stats, None)
    with without_autocast(q.device.type):
        backend = choose(problem, "auto", BACKENDS)
        computed = partial.backward(backend, problem, saved, do, None, ())
        for name, x in written.items():
            heads_first(x).copy_(computed[name])
        return (do.to(dtype) * o).sum(-1).view(lse.shape)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _check_like(
    name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    check_tensor(name, x, (dtype,), device)
    check_storage(((name, x),))
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name} must have the shape {tuple(shape)}, got {tuple(x.shape)}")
