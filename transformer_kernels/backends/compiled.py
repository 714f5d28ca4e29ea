"""What the backends of csrc/ share: operators of one schema, which the device of q chooses from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.autograd import fused_attention, fused_decode
from transformer_kernels.problem import AttentionProblem, Extras, KeyCache, SavedForBackward


class CompiledBackend:
    """Everything but what it can take."""

    def operators(self, device: torch.device) -> Any:
        """The namespace of `attention_forward`, `attention_backward` and `attention_decode`."""
        return torch.ops.transformer_kernels

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        return fused_attention(self, q, k, v, extras, problem)

    def decode(
        self, q: Tensor, cache: KeyCache, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        return fused_decode(self._decode, q, cache, problem)

    def _decode(
        self, q: Tensor, cache: KeyCache, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        o, lse = self.operators(q.device).attention_decode.default(
            q, *cache, *ops.decode_numbers(problem)
        )
        return o, lse

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        o, lse, block_summary = self.operators(q.device).attention_forward.default(
            q, k, v, *extras, *ops.numbers(problem)
        )
        return o, lse, block_summary if ops.needs_summary(extras) else None

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
            do, dlse, *saved, *extras, *ops.numbers(problem), bias_needs_grad, deterministic
        )
        return dq, dk, dv, dbias if bias_needs_grad else None
