"""What every backend offers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from transformer_kernels.problem import AttentionProblem, Extras, KeyCache, SavedForBackward


class Backend(Protocol):
    """A way to compute attention. What a call means is the API's; a backend says what it lacks."""

    @property
    def name(self) -> str: ...

    def why_unavailable(self) -> str | None:
        """Why it can run nothing on this machine; None where it can run something."""

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        """Why this backend cannot take the problem; empty when it can."""

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> str:
        """The kernel that would run, for people. It may depend on how q, k and v lie in memory."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        """(o, lse), differentiable."""

    def decode(
        self, q: Tensor, cache: KeyCache, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        """(o, lse) of queries against a cache, where `problem.is_cached`."""


class FusedKernels(Protocol):
    """A forward and a backward kernel; `autograd.FusedAttention` makes them differentiable."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(o, lse, block_summary); the summary, if there is one, is kept for the backward pass."""

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        saved: SavedForBackward,
        extras: Extras,
        problem: AttentionProblem,
        *,
        bias_needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(dq, dk, dv, dbias); dbias is None unless asked for."""
