"""What is timed: a forward pass, a backward pass, or both, each time from fresh tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transformer_kernels.bench.cases import Attend, Direction, Inputs

Work = Callable[[], object]
"""What is timed"""
Prepare = Callable[[], Work]
"""What is not: it sets up one piece of work"""


def prepare_work(
    attend: Attend, inputs: Inputs, direction: Direction, learned: Sequence[Tensor] = ()
) -> Prepare:
    """`fwd` is inference (no_grad). `fwd+bwd` is a training step's share: o, then dq, dk and dv.
    `bwd` is the backward pass alone; its forward pass is part of the set-up. `learned` is
    `Case.learned`, whose gradients come with them."""
    if direction == "fwd":
        return lambda: lambda: _infer(attend, inputs)

    def prepare() -> Work:
        leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
        if direction == "bwd":
            o = attend(*leaves)
            return lambda: torch.autograd.grad(o, (*leaves, *learned), inputs.do)
        return lambda: torch.autograd.grad(attend(*leaves), (*leaves, *learned), inputs.do)

    return prepare


@torch.no_grad()
def _infer(attend: Attend, inputs: Inputs) -> Tensor:
    return attend(*inputs[:3])
