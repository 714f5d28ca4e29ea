"""Run of a validated call: choice of the backend, kernels, attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..problem import Problem
from ..scores.sinks import join_sinks
from . import sharded
from .autocast import without_autocast
from .autograd import run_kernels
from .choose import choose
from .gather import gathering


def run(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns (o, lse), differentiable. DTensors give DTensors.

    Raises ValueError if the named backend does not support the problem.
    """
    if sharded.are_distributed(q, k, v):
        return _run_sharded(problem, q, k, v, sinks=sinks, backend=backend)
    gathered = gathering(problem, q, k, v, backend)
    with without_autocast(q.device.type):
        if gathered is None:
            o, lse = run_kernels(choose(problem, backend, BACKENDS), problem, q, k, v)
        else:
            o, lse = gathered.run(problem, q, v)
    if sinks is None:
        return o, lse
    o, lse = join_sinks(o, lse, sinks)
    if problem.layout.cu_seqlens_q is not None:
        row = torch.arange(q.shape[2], device=q.device)  # trailing padding has no sink
        lse = lse.masked_fill(row >= problem.layout.cu_seqlens_q[-1], float("-inf"))
    return o, lse


def _run_sharded(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    sharding = sharded.sharding_of(problem, q, k, v)
    if sinks is not None:
        sinks = sharding.part(sinks, (None, 0))
    o, lse = run(*sharded.own_part(problem, sharding, q, k, v), sinks=sinks, backend=backend)
    rows = q.shape[:3]
    return sharding.whole(o, (*rows, v.shape[3])), sharding.whole(lse, rows)
