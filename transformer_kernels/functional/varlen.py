"""The `attention_varlen` operator: attention over packed sequences of different lengths."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from ..common.argument_checks import check_bool
from ..common.overrides import is_overridden, overridden
from ..dispatch.autocast import cast_for_autocast
from ..dispatch.division import check_undivided
from ..dispatch.run import run
from ..masks.mask import Mask
from ..problem.checks import scaled_queries
from ..problem.varlen import one_entry, varlen_problem
from ..scores.alibi import Alibi
from ..scores.relative import Relative
from .signatures import VarlenOptions


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    mask: Mask | None = None,
    bias: Alibi | None = None,
    relative: Relative | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention for each of B sequences that are packed into one tensor without padding.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and keys and values
    likewise; a length may be 0. Its result is that of `attention` on this sequence alone: windows,
    ALiBi and "bottom_right" use its own lengths. The dropout mask depends on (seed, b, h, i, j),
    where i and j count within the sequence.

    Args:
        q: queries (total_q, H_q, D) in float16, bfloat16, float32 or float64; any strides.
        k: keys (total_k, H_kv, D) with q's dtype and device; any strides. H_q is a multiple of H_kv
            (grouped-query and multi-query attention). With `block_table`: pages
            (pages, H_kv, page_size, D) of any page_size. The backends "cpu" and "triton" read
            them in place; those in use are copied for derivatives, and by other backends.
        v: values (total_k, H_kv, D_v) with q's dtype and device; any strides. With `block_table`:
            pages (pages, H_kv, page_size, D_v).
        cu_seqlens_q: cumulative lengths (B + 1,), int32 or int64 on q's device: 0, then the end of
            each sequence. Rows of q after the last sequence are trailing padding: o = 0,
            lse = -inf, gradients 0.
        cu_seqlens_k: cumulative lengths of k and v. Default: cu_seqlens_q; required with
            `block_table`, where it gives the keys in use of each sequence.
        max_seqlen_q: upper bound of the query lengths. By default it is read from cu_seqlens_q,
            which synchronises with a GPU and breaks the graph under `torch.compile`.
        max_seqlen_k: upper bound of the key lengths. Default: as for max_seqlen_q; max_seqlen_q if
            cu_seqlens_k is None.
        block_table: (B, max_pages) int32 or int64 on q's device: key j of sequence b is row
            j % page_size of page block_table[b, j // page_size], as in `attention_decode`. Entries
            after the last page in use are ignored.
        mask: windows and causal masks that share one `align`, applied to every sequence.
        bias: `alibi(slopes)` with the mask's `align`, added after scale and softcap; slopes
            (B, H_q) differ between sequences.
        relative: `relative_bias` or `relative_keys` with the mask's `align`, as in `attention`.
        scale: factor of q k^T, a number or a tensor with one element, as in `attention`. Default:
            1/sqrt(D).
        softcap: bound of the scores: softcap * tanh(scale * q k^T / softcap). Default: no bound.
        dropout_p: dropout probability of the attention weights, from 0 to 1.
        seed: dropout seed, an int or an int64 scalar tensor. Default: drawn from torch's generator.
        sinks: attention sinks (H_q,): one logit per head, added to the softmax denominator;
            differentiable.
        return_lse: also returns the log-sum-exp of the scores, which is differentiable.
        backend: "auto", "cpu", "cuda", "triton" or "reference". A named backend never falls back to
            another one.

    Returns:
        o (total_q, H_q, D_v) in q's dtype; with `return_lse`, the pair (o, lse). lse (H_q, total_q)
        is the natural-log log-sum-exp in float32 (float64 for float64 inputs), including the sinks.
        A row without a visible key has o = 0 and lse = -inf (with sinks, lse = the sink).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value, or the named backend does not
            support the call. On a GPU, the values of cu_seqlens are checked only if a max_seqlen is
            not given, and those of block_table are not checked; in compiled code neither are.
        RuntimeError: in compiled code on the CPU, the kernel would read rows or pages that do not
            exist.

    Source: docs/attention.md, section 6.
    """
    options: dict[str, Any] = {
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "mask": mask, "bias": bias,
        "relative": relative, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
        "seed": seed, "sinks": sinks,
    }  # fmt: skip
    if is_overridden(
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, bias, relative, scale, seed, sinks
    ):
        others: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
        others |= {"return_lse": return_lse, "backend": backend}
        return overridden(attention_varlen, q, k, v, cu_seqlens_q, **others, **options)
    check_undivided("attention_varlen")
    check_bool("return_lse", return_lse)
    q, options["scale"] = scaled_queries(q, scale)
    q, k, v = cast_for_autocast(q, k, v)
    problem = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table=block_table, **options
    )
    if block_table is None:
        k, v = one_entry(k), one_entry(v)
    o, lse = run(problem, one_entry(q), k, v, sinks=sinks, backend=backend)
    o, lse = o.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (o, lse) if return_lse else o
