"""Errors against float64, of outputs and of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Attend, Case, Direction, Inputs
from .variants import ours


class Outputs(NamedTuple):
    """Outputs and gradients of a forward and a backward pass."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are not None, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def error(self, exact: Outputs, direction: Direction) -> float:
        """Returns the direction's largest error, each tensor's relative to its largest value."""
        chosen = {"fwd": slice(1), "bwd": slice(1, None), "fwd+bwd": slice(None)}[direction]
        wanted = exact.tensors()
        return max(
            float((got.double() - wanted[name]).abs().max() / wanted[name].abs().max())
            for name, got in list(self.tensors().items())[chosen]
        )


def run_once(attend: Attend, inputs: Inputs, learned: Sequence[Tensor] = ()) -> Outputs:
    """Runs one forward and backward pass. `learned` is `Case.learned`."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    o = attend(*leaves)
    return Outputs(o.detach(), *torch.autograd.grad(o, (*leaves, *learned), inputs.do))


def exact_outputs(case: Case, inputs: Inputs) -> Outputs:
    """Computes the outputs in float64 with the reference backend.

    Key heads run one by one, because float64 score matrices of all heads may not fit in memory.
    With dropout all heads run together, because the bits depend on the head index.
    """
    group = case.H_q // case.H_kv
    together = case.H_kv if case.dropout_p else 1
    by_head = []
    for h in range(0, case.H_kv, together):
        own, shared = slice(h, h + together), slice(h * group, (h + together) * group)
        q, do = inputs.q[:, shared].double(), inputs.do[:, shared].double()
        k, v = inputs.k[:, own].double(), inputs.v[:, own].double()
        part = replace(case, bias=_exact_bias(case, shared))
        by_head.append(run_once(ours("reference")(part), Inputs(q, k, v, do), part.learned))
    parts = [outputs.tensors().values() for outputs in by_head]
    return Outputs(*(torch.cat(heads, dim=1) for heads in zip(*parts, strict=True)))


def _exact_bias(case: Case, heads: slice) -> Tensor | None:
    if case.bias is None:
        return None
    return case.bias.detach()[:, heads].double().requires_grad_(case.bias.requires_grad)
