"""Results of rectangles, which are some queries and some keys: their sum, and their gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, ReferenceBackend
from ..backends.base import Outputs
from ..backends.reference import reference_attention
from ..problem import Problem, Saved, Shape
from ..scores.options import DIFFERENTIABLE


class Total(NamedTuple):
    """Results of a shard's queries, in the dtype of softmax statistics."""

    o: Tensor
    row_stats: Tensor
    """As `Outputs.row_stats`."""


def no_keys(shape: Shape) -> Total:
    """Returns the results of queries that have seen no key."""
    B, H, M, dtype = shape.B, shape.H_q, shape.M, shape.accumulate_dtype
    o = torch.zeros(B, H, M, shape.D_v, dtype=dtype, device=shape.device)
    row_stats = torch.zeros(2, B, H, M, dtype=dtype, device=shape.device)
    row_stats[0] = float("-inf")
    return Total(o, row_stats)


def forward(backend: Backend, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """Runs the forward kernel of a rectangle."""
    if isinstance(backend, ReferenceBackend):
        o, lse = reference_attention(problem, q, k, v)
        return Outputs(o, torch.stack((lse, torch.zeros_like(lse))), None)
    return backend.forward(problem, q, k, v)


def add(total: Total, rows: slice, part: Outputs) -> None:
    """Adds the keys of a rectangle to the results of its rows, in-place.

    o += sigmoid(lse' - lse) (o' - o),  lse = log(exp(lse) + exp(lse')): a row that sees no key on
    one side keeps the result of the other one. The rounding errors of lse take part, and the new
    one is kept: docs/attention.md, section 8.
    """
    o, (lse, rest) = total.o[:, :, rows], total.row_stats[..., rows]
    difference = (part.row_stats[0] - lse) + (part.row_stats[1] - rest)
    weight = torch.sigmoid(difference).nan_to_num_(nan=0.0)  # both are -inf
    o.lerp_(part.o.to(o.dtype), weight[..., None])
    high = torch.maximum(lse, part.row_stats[0])
    low = torch.where(difference > 0, part.row_stats[1], rest) + (-difference.abs()).exp().log1p()
    low.masked_fill_(high == float("-inf"), 0.0)
    torch.add(high, low, out=lse)
    rest.copy_(torch.where(high == float("-inf"), 0.0, (high - lse) + low))


def backward(
    backend: Backend,
    problem: Problem,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str],
) -> Mapping[str, Tensor]:
    """Returns the gradients of a rectangle's q, k, v and of the wanted options, by name.

    `saved` has the o and lse of all keys. The kernels compute p = exp(s - lse) from it, which is
    the rectangle's part of the weights.
    """
    if isinstance(backend, ReferenceBackend):
        return _reference_backward(problem, saved, do, dlse, wanted)
    is_compiling = torch.compiler.is_compiling()  # the operator itself is part of the graph
    gradients = backend.backward(
        problem, saved, do, dlse, wanted=wanted, differentiable=is_compiling
    )
    return {name: x for name, x in gradients._asdict().items() if x is not None}


def _reference_backward(
    problem: Problem, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Collection[str]
) -> Mapping[str, Tensor]:
    """Differentiates the rectangle's own o' and lse'. With w = exp(lse' - lse), their gradients are
    do' = w do and dlse' = w (rowsum(do (o' - o)) + dlse)."""
    scores = problem.scores
    inputs = {"q": saved.q, "k": saved.k, "v": saved.v}
    inputs |= {name: getattr(scores, name) for name in DIFFERENTIABLE if name in wanted}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        options = {name: x for name, x in inputs.items() if name in wanted}
        o, lse = reference_attention(
            problem.with_tensors(options), inputs["q"], inputs["k"], inputs["v"]
        )
    dtype = lse.dtype
    weight = torch.exp(lse.detach() - saved.row_stats[0]).nan_to_num_(nan=0.0)
    do = do.to(dtype)
    of_lse = (do * (o.detach().to(dtype) - saved.o.to(dtype))).sum(-1)
    of_lse = of_lse if dlse is None else of_lse + dlse
    outputs = ((do * weight[..., None]).to(o.dtype), weight * of_lse)
    gradients = torch.autograd.grad(
        (o, lse), list(inputs.values()), outputs, allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, gradients, strict=True))
