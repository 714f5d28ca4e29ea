"""Calls of the compiled operators. The CPU and CUDA kernels share one schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.problem import AttentionProblem, KVCache, SavedForBackward, TensorArgs


class NativeBackend:
    """Common part of the cpu and cuda backends; subclasses declare which calls they support."""

    def operators(self, device: torch.device) -> Any:
        """Returns the operator namespace that runs on the device."""
        return torch.ops.transformer_kernels

    def decode(self, q: Tensor, cache: KVCache, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
        o, lse = self.operators(q.device).attention_decode.default(
            q, *cache, *schema.decode_scalar_args(problem)
        )
        return o, lse

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        o, lse, block_mask = self.operators(q.device).attention_forward.default(
            q, k, v, *tensor_args, *schema.scalar_args(problem)
        )
        return o, lse, block_mask if schema.needs_block_mask(tensor_args) else None

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        saved: SavedForBackward,
        tensor_args: TensorArgs,
        problem: AttentionProblem,
        *,
        bias_needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv, dbias = self.operators(do.device).attention_backward.default(
            do,
            dlse,
            *saved,
            *tensor_args,
            *schema.scalar_args(problem),
            bias_needs_grad,
            deterministic,
        )
        return dq, dk, dv, dbias if bias_needs_grad else None
