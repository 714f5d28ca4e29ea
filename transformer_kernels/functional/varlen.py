"""`attention_varlen`: sequences of different lengths, packed one behind another without padding."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from transformer_kernels.dispatch.autocast import cast_for_autocast, without_autocast
from transformer_kernels.dispatch.autograd import attend
from transformer_kernels.dispatch.choose import choose
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.varlen import build_varlen_problem, one_entry
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.sinks import join_sinks


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of every sequence by itself, of B that lie packed one behind another.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and keys and values
    likewise. Everything counts within it: windows, ALiBi, "bottom_right" by its own N - M, and
    dropout, whose bits are those of (seed, b, h, i, j). Lengths may be 0.

    Args:
        q: queries (total_q, H_q, D); float16, bfloat16, float32 or float64, any strides.
        k: keys (total_k, H_kv, D), same dtype and device; H_q is a multiple of H_kv (GQA, MQA).
        v: values (total_k, H_kv, D_v).
        cu_seqlens_q: (B + 1,) int32 or int64 on q's device: 0, then where each sequence ends. Rows
            behind the last one give o = 0 and lse = -inf, and get gradients of 0.
        cu_seqlens_k: the same for k and v; cu_seqlens_q unless given.
        max_seqlen_q: the length of the longest sequence of q, or more. Unless given it is read from
            cu_seqlens_q, for which a GPU has to finish what it does, and `torch.compile` breaks the
            graph.
        max_seqlen_k: the same for k and v; where cu_seqlens_k is not given, max_seqlen_q.
        mask: windows and causal masks, of one `align`; what is visible in every sequence.
        bias: `alibi(slopes)`, of the mask's `align`.
        scale: multiplies q k^T; 1/sqrt(D) unless given.
        softcap: scores become softcap * tanh(score / softcap), before the bias.
        dropout_p: probability with which an attention weight is dropped, 0 to 1.
        seed: of the dropout bits, int or int64 scalar tensor; drawn from torch's generator unless
            given.
        sinks: (H_q,) a logit a head that joins the softmax's denominator; differentiable.
        return_lse: also return log sum exp of the scores (natural log), differentiable, float32
            (float64 for float64) (H_q, total_q). With sinks it includes them.
        backend: "auto", or the name of one backend, which then runs or raises.

    Returns:
        o (total_q, H_q, D_v) in q's dtype, or (o, lse). Rows with no visible key are 0.

    Raises:
        TypeError, ValueError: an argument is not as above, or the named backend cannot take it. On
            a GPU the values of cu_seqlens are looked at only where a max_seqlen is not given, and
            in compiled code not at all.

    Source: docs/attention.md, section 6.
    """
    q, k, v = cast_for_autocast(q, k, v)
    problem, tensor_args = build_varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        mask, bias, scale, softcap, dropout_p, seed, sinks,
    )  # fmt: skip
    chosen = choose(problem, backend)
    with without_autocast(q.device.type):
        o, lse = attend(chosen, one_entry(q), one_entry(k), one_entry(v), tensor_args, problem)
    if sinks is not None:
        o, lse = join_sinks(o, lse, sinks)
        row = torch.arange(q.shape[0], device=q.device)
        lse = lse.masked_fill(row >= cu_seqlens_q[-1], float("-inf"))
    o, lse = o.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (o, lse) if return_lse else o
