"""What is measured: sizes, options, and how much arithmetic and traffic that asks for at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.bench.provenance import CPU
from transformer_kernels.masks.mask import Mask

Direction = Literal["fwd", "bwd", "fwd+bwd"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v -> o"""

SEED = 20240229
"""Of the dropout bits"""


class Inputs(NamedTuple):
    """Random normal tensors. Zeros would do as well for shapes, but not for time: sparse or
    repeated values change branches, and power."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem, with the same mask for every head."""

    name: str
    B: int = 1
    H_q: int = 8
    H_kv: int = 8
    M: int
    N: int
    D: int = 64
    D_v: int = 64
    dtype: torch.dtype = torch.float32
    mask: Mask | None = None
    mask_name: str = "none"
    bias: Tensor | None = None
    """(B, H_q, M, N); measured with its gradient where it requires one"""
    dropout_p: float = 0.0
    device: torch.device = CPU
    """Where the inputs are made; the mask and the bias lie there"""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """What a backward pass differentiates besides q, k and v."""
        return () if self.bias is None or not self.bias.requires_grad else (self.bias,)

    @cached_property
    def visible(self) -> float:
        """The share of the M x N pairs that the mask shows."""
        if self.mask is None:
            return 1.0
        shown = self.mask.materialize(self.B, 1, self.M, self.N, self.device)
        return int(shown.count_nonzero()) / shown.numel()

    def to(self, device: torch.device) -> Case:
        """The same case with everything on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        if self.bias is None:
            return replace(self, mask=mask, device=device)
        bias = self.bias.detach().to(device).requires_grad_(self.bias.requires_grad)
        return replace(self, mask=mask, bias=bias, device=device)

    def inputs(self, *, seed: int = 0) -> Inputs:
        generator = torch.Generator(self.device).manual_seed(seed)
        shapes = (
            (self.B, self.H_q, self.M, self.D),
            (self.B, self.H_kv, self.N, self.D),
            (self.B, self.H_kv, self.N, self.D_v),
            (self.B, self.H_q, self.M, self.D_v),
        )
        numbers = (torch.randn(s, generator=generator, device=self.device) for s in shapes)
        return Inputs(*(x.to(self.dtype) for x in numbers))

    def operations(self, direction: Direction) -> float:
        """Floating-point operations of the matrix products, over visible pairs only.

        Forward: q kᵀ and p v. Backward: q kᵀ again, do vᵀ, pᵀ do, ds k, dsᵀ q.
        """
        pairs = 2.0 * self.B * self.H_q * self.M * self.N * self.visible
        forward, backward = self.D + self.D_v, 3 * self.D + 2 * self.D_v
        return pairs * _sum_over(direction, forward, backward)

    def traffic(self, direction: Direction) -> float:
        """Bytes of every input read once and every output written once."""
        q, o = (self.B * self.H_q * self.M * width for width in (self.D, self.D_v))
        k, v = (self.B * self.H_kv * self.N * width for width in (self.D, self.D_v))
        forward = q + k + v + o
        backward = 2 * (q + k + v + o)  # reads q, k, v, o and do; writes dq, dk, dv
        return float(_sum_over(direction, forward, backward) * self.dtype.itemsize)


def refuse_options(who: str, case: Case) -> None:
    """ValueError where the case has a bias or dropout."""
    if case.bias is not None or case.dropout_p:
        raise ValueError(f"{who} is not measured with bias or dropout, got {case.name!r}")


def _sum_over(direction: Direction, forward: int, backward: int) -> int:
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]
