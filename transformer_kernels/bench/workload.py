"""Workloads: a forward pass, a backward pass, or both, from fresh tensors in each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .cases import Attend, Direction, Inputs

Workload = Callable[[], object]
"""Measured code."""
Prepare = Callable[[], Workload]
"""Set-up, not measured: returns one workload, to be run once."""


def prepare_work(
    attend: Attend,
    inputs: Inputs,
    direction: Direction,
    learned: Sequence[Tensor] = (),
    *,
    may_ignore: bool = False,
) -> Prepare:
    """Returns the set-up of one direction.

    Args:
        attend: the attention function.
        inputs: q, k, v and do.
        direction: "fwd" is inference (no_grad); "fwd+bwd" computes o, then dq, dk and dv; "bwd" is
            the backward pass alone, with the forward pass in the set-up.
        learned: `Case.learned`, further tensors to differentiate.
        may_ignore: True if the function need not depend on all tensors.
    """
    if direction == "fwd":
        return lambda: lambda: _infer(attend, inputs)

    gradients = partial(torch.autograd.grad, allow_unused=may_ignore)

    def prepare() -> Workload:
        leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
        if direction == "bwd":
            o = attend(*leaves)
            return lambda: gradients(o, (*leaves, *learned), inputs.do)
        return lambda: gradients(attend(*leaves), (*leaves, *learned), inputs.do)

    return prepare


@torch.no_grad()
def _infer(attend: Attend, inputs: Inputs) -> Tensor:
    return attend(*inputs[:3])
