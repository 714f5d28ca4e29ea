"""The triton backend."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels.backends import schema
from transformer_kernels.backends.triton import config, interpreter, operators, target
from transformer_kernels.problem import AttentionProblem, KVCache, SavedForBackward, TensorArgs


class TritonBackend:
    """float16, bfloat16 and float32 on any GPU that Triton supports, or interpreted on the CPU."""

    name = "triton"
    is_interpreted = interpreter.is_on()
    """True if kernels are interpreted: much slower than plain torch, so "auto" skips them."""

    def unavailable_reason(self) -> str | None:
        reason: str | None = target.reason_against(
            torch.device("cpu" if self.is_interpreted else "cuda")
        )
        return reason

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        unavailable = target.reason_against(problem.device)
        if unavailable is not None:
            return [unavailable]
        if problem.is_cached:
            return ["decoding from a cache: there is no Triton kernel for it"]
        reasons = []
        columns, chip = max(problem.D, problem.D_v), target.chip(problem.device)
        if problem.dtype == torch.float64:
            reasons.append("float64: these kernels compute in float32")
        elif columns > config.WIDTHS[-1]:
            reasons.append(f"rows of {columns} elements: tiles are up to {config.WIDTHS[-1]} wide")
        elif config.tile("bwd_dkdv", chip, problem.dtype.itemsize, columns) is None:
            reasons.append(
                f"rows of {columns} elements of {problem.dtype}: no tile fits the "
                f"{chip.shared_kib} KiB of shared memory that {chip.name} has"
            )
        if problem.alibi_slopes_need_grad:
            reasons.append("ALiBi slopes that require grad: only plain torch differentiates them")
        return reasons

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        from transformer_kernels.backends.triton import launch

        tile, _ = launch.tiling("forward", problem, tensor_args)
        how = "interpreted by numpy" if self.is_interpreted else target.chip(problem.device).name
        return f"backends/triton, {how}, forward tile {tile.block_m} x {tile.block_n}"

    def decode(self, q: Tensor, cache: KVCache, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("unsupported_reasons() excludes decoding")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs, problem: AttentionProblem
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        o, lse, block_mask = operators.forward(q, k, v, *tensor_args, *schema.scalar_args(problem))
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
        dq, dk, dv, dbias = operators.backward(
            do, dlse, *saved, *tensor_args, *schema.scalar_args(problem), bias_needs_grad
        )
        return dq, dk, dv, dbias if bias_needs_grad else None
