"""The cpu backend: blockwise online-softmax kernels without M x N memory (csrc/cpu/)."""

from __future__ import annotations

from torch import Tensor

from transformer_kernels.backends.native import extension
from transformer_kernels.backends.native.base import NativeBackend
from transformer_kernels.problem import AttentionProblem, TensorArgs


class CpuBackend(NativeBackend):
    """All four dtypes on any CPU. The instruction set is selected at run time."""

    name = "cpu"

    def unavailable_reason(self) -> str | None:
        return extension.unavailable_reason()

    def unsupported_reasons(self, problem: AttentionProblem) -> list[str]:
        reasons = []
        if problem.device.type != "cpu":
            reasons.append(
                f"the tensors are on {problem.device}; the cpu backend needs CPU tensors"
            )
        if problem.alibi_slopes_need_grad:
            reasons.append("ALiBi slopes that require grad: only plain torch differentiates them")
        unavailable = self.unavailable_reason()
        if unavailable is not None:
            reasons.append(unavailable)
        return reasons

    def kernel(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, tensor_args: TensorArgs
    ) -> str:
        accumulate = str(problem.accumulate_dtype).removeprefix("torch.")
        return f"csrc/cpu, {extension.compiled.isa()}, computing in {accumulate}"
