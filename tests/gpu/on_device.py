"""Shared helpers of the GPU tests: tensors on a CUDA device, and one forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import transformer_kernels as tk

Step = Callable[[], tuple[Tensor, ...]]


class Tensors(NamedTuple):
    """Inputs of one call; q, k and v require grad."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def tensors(
    *, B: int = 2, H: int = 2, M: int = 193, N: int = 193, D: int = 64,
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
) -> Tensors:  # fmt: skip
    q, k, v, do = (
        torch.randn(B, H, length, D, dtype=dtype, device=device) for length in (M, N, N, M)
    )
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do)


def step(x: Tensors, backend: str, **options: Any) -> tuple[Tensor, ...]:
    """Returns o, dq, dk and dv."""
    o = tk.attention(x.q, x.k, x.v, **options, backend=backend)
    return o.detach(), *torch.autograd.grad(o, x[:3], x.do)


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        assert torch.equal(one, other), f"{name} differs by up to {(one - other).abs().max()}"
