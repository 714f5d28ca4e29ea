"""Backends of a family of operators: compiled kernels, Triton kernels, and plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..backends.native import extension
from ..backends.native.cpu import reasons_against
from ..backends.triton import target
from ..common.namespace import NAMESPACE
from ..common.torch_private import below_autograd, transforms
from .family import BackwardCall, Family, FamilyProblem


class Kernels:
    """Calls of three operators in a namespace.

    torch differentiates and batches the operators by `linear.registration`. Calls that are not
    `differentiable` run the kernels alone.
    """

    def __init__(self, family: Family, prefix: str = "", namespace: str = NAMESPACE) -> None:
        self.family, self.namespace = family, namespace
        self.names = tuple(prefix + name for name in family.names)

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return getattr(torch.ops, self.namespace)

    def forward(self, x: Any, options: Any, *, differentiable: bool = False) -> Any:
        operator = getattr(self.operators(x[0].device), self.names[0]).default
        with nullcontext() if differentiable else below_autograd():
            return self.family.Results(*operator(*self.family.pack(x, options)))

    def backward(self, call: BackwardCall, *, differentiable: bool = False) -> Any:
        operator = getattr(self.operators(call.x[0].device), self.names[1]).default
        with nullcontext() if differentiable else below_autograd():
            return self.family.gradients(call, operator(*self.family.pack_backward(call)))


class KernelBackend(Kernels, ABC):
    """Kernels for one kind of device, as torch operators."""

    name: str
    most_steps: int
    """Longest call of `steps` that the recurrence computes; chunks are faster for more tokens."""

    @abstractmethod
    def unsupported_reasons(self, problem: FamilyProblem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    @abstractmethod
    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, for `explain`."""

    def steps(self, x: Any, options: Any) -> Tensor:
        """Returns the first result, one token after another; overwrites the state in x."""
        if x[0].shape[2] > self.most_steps or transforms():
            return overwrite_state(self.family, x, self.forward(x, options, differentiable=True))
        operator = getattr(self.operators(x[0].device), self.names[2]).default
        with nullcontext() if torch.compiler.is_compiling() else below_autograd():
            o: Tensor = operator(*self.family.pack_steps(x, options))
        return o


class CpuBackend(KernelBackend):
    """Compiled kernels for all four dtypes on any CPU."""

    name = "cpu"

    def __init__(self, family: Family, folder: str, most_steps: int) -> None:
        super().__init__(family)
        self.folder, self.most_steps = folder, most_steps

    def unsupported_reasons(self, problem: FamilyProblem) -> list[str]:
        return reasons_against(problem.shape.device)

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        computing = str(problem.shape.accumulate_dtype).removeprefix("torch.")
        return f"{self.folder}, {extension.compiled.isa()}, computing in {computing}"


class TritonBackend(KernelBackend):
    """float16, bfloat16 and float32 on any GPU that Triton supports, or interpreted on the CPU."""

    name = "triton"
    most_steps = 32  # not timed on a GPU
    is_interpreted = target.INTERPRETED
    """True if kernels are interpreted: much slower than plain torch, so "auto" skips them."""
    widest: int
    """Elements of the widest row of a tile."""

    def __init__(self, family: Family) -> None:
        super().__init__(family, "triton_")

    def unsupported_reasons(self, problem: FamilyProblem) -> list[str]:
        shape = problem.shape
        unavailable = target.reason_against(shape.device)
        if unavailable is not None:
            return [unavailable]
        if shape.dtype == torch.float64:
            return ["float64: these kernels compute in float32"]
        columns = max(shape.D, shape.D_v)
        if columns > self.widest:
            return [f"rows of {columns} elements: tiles are up to {self.widest} wide"]
        return []


class ReferenceBackend:
    """Plain torch on any device, in any dtype, to any order of derivative."""

    name = "reference"

    def __init__(self, family: Family, description: str) -> None:
        self.family, self.description = family, description

    def unsupported_reasons(self, problem: FamilyProblem) -> list[str]:
        return []

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        return self.description

    def steps(self, x: Any, options: Any) -> Tensor:
        return overwrite_state(self.family, x, self.family.reference(x, options))


Backend = KernelBackend | ReferenceBackend


def overwrite_state(family: Family, x: Any, results: Any) -> Tensor:
    """Copies the final state into that of x; returns the first result."""
    for name in family.overwritten:
        getattr(x, name).copy_(getattr(results, name))
    o: Tensor = results[0]
    return o
