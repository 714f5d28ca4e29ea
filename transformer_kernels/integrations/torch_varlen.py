"""CPU kernels of the operators that `torch.nn.attention.varlen` calls, which torch has on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..backends import CpuBackend
from ..common import torch_private
from ..dispatch.choose import choose
from ..functional.varlen import attention_varlen
from ..masks.mask import Mask
from ..problem import Saved
from ..problem.varlen import one_entry, varlen_problem
from .paged_varlen import attend_pages

_CPU = CpuBackend()


def register(library: torch.library.Library, is_on: Callable[[], bool]) -> None:
    """Registers the CPU kernels, if torch has the operators.

    The kernels raise NotImplementedError, as torch does, while `is_on()` is False.

    Args:
        library: an "IMPL" library of the namespace aten.
        is_on: whether the replacement is in effect.
    """
    if torch_private.MISSING_FOR_VARLEN:
        return
    kernels: tuple[Callable[..., Any], ...] = (_forward, _forward_into, _backward)
    for operator, kernel in zip(torch_private.varlen_operators, kernels, strict=True):
        library.impl(operator, _switched(operator, kernel, is_on), "CPU")


def _switched(operator: Any, kernel: Callable[..., Any], is_on: Callable[[], bool]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_on():
            raise NotImplementedError(f"{operator} has no kernel for the CPU")
        return kernel(*args, **kwargs)

    return run


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes (o, lse, random state, unused, debug mask).

    Args:
        query: (total_q, H_q, D).
        key: (total_k, H_kv, D); with block_table, pages (pages, page_size, H_kv, D).
        value: as key, with D_v.
        cum_seq_q: cumulative lengths (B + 1,).
        cum_seq_k: cumulative lengths (B + 1,); not used with block_table.
        max_q: upper bound of the query lengths.
        max_k: upper bound of the key lengths.
        dropout_p: 0.
        is_causal: sets window_size_right to 0.
        return_debug_mask: False.
        scale: factor of the scores.
        window_size_left: visible keys before the bottom-right aligned diagonal; None or negative is
            unbounded.
        window_size_right: visible keys after it.
        seqused_k: keys in use (B,); the others are not read.
        alibi_slopes: None.
        block_table: (B, pages of a sequence), with seqused_k.
        num_splits: no effect: bits do not depend on other sequences.
    """
    cum_seq_q = _checked(cum_seq_q, dropout_p, return_debug_mask, alibi_slopes)
    mask = _mask(is_causal, window_size_left, window_size_right)
    if block_table is not None:
        if seqused_k is None:
            raise ValueError("block_table needs seqused_k")
        o, lse = attend_pages(
            query, key, value, cum_seq_q, _ends(seqused_k), block_table, max_seqlen_q=max_q,
            max_seqlen_k=max_k, mask=mask, scale=scale, backend=_CPU.name,
        )  # fmt: skip
    else:
        if seqused_k is not None:
            key, value, cum_seq_k = _keys_in_use(key, value, cum_seq_k, seqused_k)
        o, lse = attention_varlen(
            query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            mask=mask, scale=scale, return_lse=True, backend=_CPU.name,
        )  # fmt: skip
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return o, lse, random_state, unused, query.new_empty(0)


def _forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Writes o to `out`; returns lse."""
    o, lse, *_ = _forward(*args, **kwargs)
    out.copy_(o)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (dq, dk, dv) from the arguments and results of `_forward`."""
    cum_seq_q = _checked(cum_seq_q, dropout_p)
    problem = varlen_problem(
        query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        mask=_mask(is_causal, window_size_left, window_size_right), scale=scale,
    )  # fmt: skip
    choose(problem, _CPU.name, (_CPU,))
    q, k, v, o, do = map(one_entry, (query, key, value, out, grad_out))
    row_stats = torch.stack((logsumexp, torch.zeros_like(logsumexp)))[:, None]
    saved = Saved(q, k, v, o, row_stats, None)
    gradients = _CPU.backward(problem, saved, do, None)
    dq, dk, dv = (x.squeeze(0).transpose(0, 1) for x in gradients[:3])
    return dq, dk, dv


def _checked(
    cum_seq_q: Tensor | None,
    dropout_p: float,
    return_debug_mask: bool = False,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Returns cum_seq_q; raises ValueError for what `varlen_attn` never asks of the operators."""
    if cum_seq_q is None:
        raise ValueError("cum_seq_q must be a tensor, got None")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if return_debug_mask:
        raise ValueError("return_debug_mask must be False: the weights are not computed")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes must be None; attention_varlen takes bias=alibi(slopes)")
    return cum_seq_q


def _mask(is_causal: bool, left: int | None, right: int | None) -> Mask:
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return Mask.window(left, 0 if is_causal else right, align="bottom_right")


def _ends(lengths: Tensor) -> Tensor:
    """Returns the cumulative lengths (B + 1,)."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _keys_in_use(
    key: Tensor, value: Tensor, cum_seq_k: Tensor | None, seqused_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies the keys and values in use, packed, and returns their cumulative lengths.

    Raises ValueError unless every sequence has room for its keys in use.
    """
    if cum_seq_k is None:
        raise ValueError("cum_seq_k must be a tensor, got None")
    lengths, capacity = seqused_k.long(), cum_seq_k.diff()
    if lengths.shape != capacity.shape or bool(((lengths < 0) | (lengths > capacity)).any()):
        raise ValueError(
            f"seqused_k must be between 0 and the keys of each sequence, {capacity.tolist()}, "
            f"got {lengths.tolist()}"
        )
    sequence = torch.repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths)[sequence]
    rows = cum_seq_k[sequence] + torch.arange(sequence.shape[0], device=lengths.device) - first
    return key[rows], value[rows], _ends(lengths)
