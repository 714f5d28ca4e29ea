"""Benchmark cases: sizes and options, with their minimum arithmetic and memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..masks.mask import Mask
from ..problem.operations import backward_operations, forward_operations
from .provenance import CPU

Direction = Literal["fwd", "bwd", "fwd+bwd", "step"]
"""`step` is a training step: forward, backward and optimizer."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v -> o"""

SIZES = ("B", "H_q", "H_kv", "M", "N", "D", "D_v")
"""Fields of a case, and columns of its rows."""

SEED = 20240229
"""Seed of the dropout bits."""


class Inputs(NamedTuple):
    """Standard normal tensors. Zeros would distort times: other branches, less power."""

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
    """(B, H_q, M, N); if it requires grad, its gradient is part of the measurement"""
    dropout_p: float = 0.0
    device: torch.device = CPU
    """device of the inputs, the mask and the bias"""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Tensors that need a gradient besides q, k and v."""
        return () if self.bias is None or not self.bias.requires_grad else (self.bias,)

    @cached_property
    def visible(self) -> float:
        """Fraction of the M x N pairs that are visible."""
        if self.mask is None:
            return 1.0
        mask = self.mask.materialize(self.B, 1, self.M, self.N, self.device)
        return int(mask.count_nonzero()) / mask.numel()

    def to(self, device: torch.device) -> Case:
        """Returns the case with all its tensors on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        if self.bias is None:
            return replace(self, mask=mask, device=device)
        bias = self.bias.detach().to(device).requires_grad_(self.bias.requires_grad)
        return replace(self, mask=mask, bias=bias, device=device)

    def inputs(self, *, seed: int = 0) -> Inputs:
        """Returns standard normal inputs on the case's device."""
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
        """Number of floating-point operations of the matrix products, over visible pairs only."""
        pairs = self.B * self.H_q * self.M * self.N * self.visible
        forward = forward_operations(pairs, self.D, self.D_v)
        backward = backward_operations(pairs, self.D, self.D_v)
        return _sum_over(direction, forward, backward)

    def traffic(self, direction: Direction) -> float:
        """Number of bytes if every input is read once and every output written once."""
        q, o = (self.B * self.H_q * self.M * width for width in (self.D, self.D_v))
        k, v = (self.B * self.H_kv * self.N * width for width in (self.D, self.D_v))
        forward = q + k + v + o
        backward = 2 * (q + k + v + o)  # reads q, k, v, o and do; writes dq, dk, dv
        return float(_sum_over(direction, forward, backward) * self.dtype.itemsize)


def check_no_options(variant: str, case: Case) -> None:
    """Raises ValueError if the case has a bias or dropout."""
    if case.bias is not None or case.dropout_p:
        raise ValueError(f"{variant} is not measured with bias or dropout, got case {case.name!r}")


def _sum_over(direction: Direction, forward: float, backward: float) -> float:
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]
