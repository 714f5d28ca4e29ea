"""Errors against float64, of outputs and of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.api import attention
from transformer_kernels.bench.cases import Case, Direction, Inputs
from transformer_kernels.bench.variants import Attend


class Outputs(NamedTuple):
    """Of a forward and a backward pass."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def error(self, exact: Outputs, direction: Direction) -> float:
        """The largest error, relative to the largest value of its tensor; the worst tensor's."""
        first, last = {"fwd": (0, 1), "bwd": (1, 4), "fwd+bwd": (0, 4)}[direction]
        return max(
            float((got.double() - want).abs().max() / want.abs().max())
            for got, want in list(zip(self, exact, strict=True))[first:last]
        )


def run_once(attend: Attend, inputs: Inputs) -> Outputs:
    """The outputs and gradients of one call."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    o = attend(*leaves)
    return Outputs(o.detach(), *torch.autograd.grad(o, leaves, inputs.do))


def exact_outputs(case: Case, inputs: Inputs) -> Outputs:
    """The same in float64, by the reference.

    Key heads are taken one by one: float64 score matrices of all heads at once may not fit.
    """
    group = case.H_q // case.H_kv
    by_head = []
    for h in range(case.H_kv):
        shared = slice(h * group, (h + 1) * group)
        q, do = inputs.q[:, shared].double(), inputs.do[:, shared].double()
        k, v = inputs.k[:, h : h + 1].double(), inputs.v[:, h : h + 1].double()
        by_head.append(
            run_once(
                lambda q, k, v: attention(q, k, v, mask=case.mask, backend="reference"),
                Inputs(q, k, v, do),
            )
        )
    return Outputs(*(torch.cat(parts, dim=1) for parts in zip(*by_head, strict=True)))
