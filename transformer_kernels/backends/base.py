"""Base class of a backend with fused kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.namespace import NAMESPACE
from ..common.storage import PLAIN_TYPES
from ..common.torch_private import below_autograd, functorch_is_active
from ..problem import Problem, Saved
from ..scores.options import DIFFERENTIABLE


class Outputs(NamedTuple):
    """Outputs of a forward kernel."""

    o: Tensor
    row_stats: Tensor
    """(2, B, H_q, M): lse and its rounding error; from a cache (1, B, H_q, M), lse alone."""
    block_mask: Tensor | None
    """Saved for the backward pass; None if the mask needs none."""


class Gradients(NamedTuple):
    """Outputs of a backward kernel: those of q, k and v, and of the options that are wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    relative_bias: Tensor | None = None
    relative_keys: Tensor | None = None

    @classmethod
    def of(cls, outputs: Sequence[Tensor], wanted: Collection[str]) -> Gradients:
        """The outputs of a backward operator; those that are not wanted become None."""
        if not wanted:
            return cls(*outputs[:3])
        options = zip(DIFFERENTIABLE, outputs[3:], strict=True)
        return cls(*outputs[:3], *(x if name in wanted else None for name, x in options))


class Kernels:
    """Calls of a forward and a backward operator, with the schemas of `backends.schema`.

    torch differentiates and batches the operators by `dispatch.operators`. Calls that are not
    `differentiable` run the kernels alone, and save the time in which torch asks whether to do so.
    """

    forward_name = "attention_forward"
    backward_name = "attention_backward"

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return getattr(torch.ops, NAMESPACE)

    def forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *, differentiable: bool = False
    ) -> Outputs:
        """Runs a problem of any layout."""
        operator = getattr(self.operators(q.device), self.forward_name).default
        with nullcontext() if differentiable else below_autograd():
            o, row_stats, block_mask = operator(q, k, v, *problem.pack())
        return Outputs(o, row_stats, block_mask if problem.mask.has_element_mask else None)

    def backward(
        self,
        problem: Problem,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        *,
        wanted: Collection[str] = (),
        differentiable: bool = False,
    ) -> Gradients:
        """Returns the gradients; `wanted` are names of `DIFFERENTIABLE` options."""
        if dlse is None and not (wanted or differentiable):
            gradients = self.direct_backward(problem, saved, do)
            if gradients is not None:
                return gradients
        operator = getattr(self.operators(do.device), self.backward_name).default
        flags = [name in wanted for name in DIFFERENTIABLE]
        deterministic = torch.are_deterministic_algorithms_enabled()
        with nullcontext() if differentiable else below_autograd():
            outputs = operator(do, dlse, *saved, *problem.pack(), *flags, deterministic)
        return Gradients.of(outputs, wanted)

    def direct_backward(self, problem: Problem, saved: Saved, do: Tensor) -> Gradients | None:
        """Runs the kernels past torch's dispatcher; None if the call needs the operator."""
        return None


class FusedBackend(Kernels, ABC):
    """Kernels for one kind of device, which `dispatch.autograd` makes differentiable.

    The package `problem` validates calls; a backend declares which of them its kernels support.
    """

    name: str
    reads_packed_pages = False
    """True if the forward kernels read the pages of packed sequences in place."""

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Returns the reason why no kernel can run on this machine; None if one can."""

    @abstractmethod
    def unsupported_reasons(self, problem: Problem) -> list[str]:
        """Returns all reasons why the kernels do not support the problem; empty if they do."""

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Describes the kernel that would run, which may depend on strides; for `explain`."""
        tensors = q, k, v, *problem.tensors().values()
        if functorch_is_active() or not all(type(x) in PLAIN_TYPES for x in tensors):
            return "which of its kernels depends on the memory of plain tensors"
        operator = self.operators(q.device).attention_describe.default
        options = [getattr(problem.scores, name) for name in DIFFERENTIABLE]
        needed = [x is not None and x.requires_grad for x in options]
        with below_autograd():
            kernel: str = operator(q, k, v, *problem.pack(), *needed)
        return kernel
