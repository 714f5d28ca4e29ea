"""The `attention_weights` function: the softmax weights of some queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.reference import reference_weights
from ..common.argument_checks import INTEGERS, check_tensor, shown, values_are_readable
from ..common.overrides import is_overridden, overridden
from ..common.storage import check_storage
from ..dispatch.autocast import cast_for_autocast, without_autocast
from ..dispatch.division import check_undivided
from ..masks.mask import Mask
from ..problem.checks import scaled_queries
from ..problem.dense import dense_problem
from ..scores.alibi import Alibi
from ..scores.relative import Relative
from ..scores.sinks import join_sinks


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor,
    mask: Mask | None = None,
    bias: Tensor | Alibi | None = None,
    relative: Relative | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes the attention weights of some queries: softmax(scale * q k^T + bias) of their rows.

    Fused attention has no weights. This function computes those of chosen rows in plain torch, on
    any device, in memory proportional to the result. It is differentiable in every floating-point
    tensor argument, to any order.

    Args:
        q: queries (B, H_q, M, D), all of them, as in `attention`.
        k: keys (B, H_kv, N, D).
        rows: R integers, the queries whose weights are wanted, in any order. Negative ones count
            from the last query. On a GPU, values out of range are not checked.
        mask: as in `attention`, for M queries and N keys, like bias and relative.
        bias: as in `attention`.
        relative: as in `attention`.
        scale: as in `attention`.
        softcap: as in `attention`.
        sinks: as in `attention`: rows sum to less than 1.

    Returns:
        p (B, H_q, R, N) in q's dtype, without dropout. A row without a visible key is 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or value.

    Source: docs/attention.md, section 2.
    """
    if is_overridden(q, k, rows, bias, relative, scale, sinks):
        return overridden(
            attention_weights, q, k, rows=rows, mask=mask, bias=bias, relative=relative,
            scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    check_undivided("attention_weights")
    q, scale = scaled_queries(q, scale)
    q, k, _ = cast_for_autocast(q, k, k)
    problem = dense_problem(
        q, k, k, mask=mask, sinks=sinks, bias=bias, relative=relative, scale=scale, softcap=softcap
    )
    indices = _indices(rows, problem.shape.M, q.device)
    with without_autocast(q.device.type):
        p, lse = reference_weights(problem, indices, q.index_select(2, indices), k)
    return p if sinks is None else join_sinks(p, lse, sinks)[0]


def _indices(rows: Sequence[int] | Tensor, M: int, device: torch.device) -> Tensor:
    """Returns the rows as int64 (R,) from 0 to M - 1."""
    if not isinstance(rows, Tensor):
        if not isinstance(rows, list | tuple | range) or any(type(i) is not int for i in rows):
            raise TypeError(f"rows must be integers, got {shown(rows)}")
        out = [i for i in rows if not -M <= i < M]
        indices = torch.tensor([] if out else rows, dtype=torch.int64, device=device)
    else:
        check_storage((("rows", rows),))
        check_tensor("rows", rows, INTEGERS, device, "integers")
        if rows.dim() != 1:
            raise ValueError(f"rows must be (R,), got shape {tuple(rows.shape)}")
        indices = rows.long()
        out = []
        if values_are_readable(rows):
            out = indices[(indices < -M) | (indices >= M)].tolist()
    if out:
        raise ValueError(f"rows must be from {-M} to {M - 1}, got {out[0]}")
    return torch.where(indices < 0, indices + M, indices)
