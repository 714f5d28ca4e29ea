"""Calls of the compiled operators, whose schema the CPU and the CUDA kernels share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.problem import AttentionProblem, Extras, KeyCache, SavedForBackward


class NativeBackend:
    """Kernels of csrc/; subclasses say which calls they support."""

    def operators(self, device: torch.device) -> Any:
        """The namespace of `attention_forward`, `attention_backward` and `attention_decode`."""
        return torch.ops.transformer_kernels

    def decode(
        self, q: Tensor, cache: KeyCache, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        o, lse = self.operators(q.device).attention_decode.default(
            q, *cache, *schema.decode_numbers(problem)
        )
        return o, lse

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        o, lse, block_summary = self.operators(q.device).attention_forward.default(
            q, k, v, *extras, *schema.numbers(problem)
        )
        return o, lse, block_summary if schema.needs_summary(extras) else None

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
        deterministic = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv, dbias = self.operators(do.device).attention_backward.default(
            do, dlse, *saved, *extras, *schema.numbers(problem), bias_needs_grad, deterministic
        )
        return dq, dk, dv, dbias if bias_needs_grad else None
