"""The compiled CPU kernels: blockwise, online softmax, nothing of size M x N (csrc/cpu/)."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.autograd import fused_attention
from transformer_kernels.problem import AttentionProblem, Extras, SavedForBackward


class CpuBackend:
    """All four dtypes on any CPU; the instruction set is chosen at run time."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        return ops.why_unavailable()

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        reasons = []
        if problem.device.type != "cpu":
            reasons.append(f"tensors are on {problem.device}, these kernels run on the CPU")
        if problem.alibi_slopes_need_grad:
            reasons.append("ALiBi slopes that require grad: only plain torch differentiates them")
        unavailable = self.why_unavailable()
        if unavailable is not None:
            reasons.append(unavailable)
        return reasons

    def kernel(self, problem: AttentionProblem) -> str:
        from transformer_kernels import _C

        accumulate = str(problem.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu, {_C.isa()}, computing in {accumulate}"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor]:
        return fused_attention(self, q, k, v, extras, problem)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        o, lse, block_summary = torch.ops.transformer_kernels.attention_forward.default(
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
        dq, dk, dv, dbias = torch.ops.transformer_kernels.attention_backward.default(
            do, dlse, *saved, *extras, *ops.numbers(problem), bias_needs_grad, True
        )
        return dq, dk, dv, dbias if bias_needs_grad else None
