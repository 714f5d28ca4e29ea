"""The operators of the gated delta rule, and their backends in the order in which backend="auto"
tries them."""

from __future__ import annotations

from torch import Tensor

from ...backends.native import extension
from ...backends.schema import empty_like_layout
from ...backends.triton import target
from ...common.namespace import NAMESPACE
from ...problem.types import accumulate_dtype
from ..backends import Backend, CpuBackend, ReferenceBackend, TritonBackend
from ..family import Family, FamilyProblem
from ..registration import register_compiled, register_triton
from ..triton.tiles import WIDTHS
from .reference import reference_delta_rule
from .types import Cotangents, Gradients, Inputs, Options, Results


def _empty_results(x: Inputs, options: Options) -> Results:
    B = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    H_v, D, D_v = x.v.shape[1], x.k.shape[3], x.v.shape[3]
    S = x.q.new_empty((B, H_v, D, D_v), dtype=accumulate_dtype(x.q.dtype))
    return Results(empty_like_layout(x.v, D_v), S)


DELTA = Family(
    name="delta",
    functions=("gated_delta_rule", "gated_delta_rule_step"),
    Inputs=Inputs,
    Options=Options,
    Results=Results,
    Cotangents=Cotangents,
    Gradients=Gradients,
    overwritten=("S",),
    reference=reference_delta_rule,
    empty_results=_empty_results,
)


class TritonDelta(TritonBackend):
    """The kernels of triton/."""

    widest = WIDTHS[-1]

    def kernel(self, problem: FamilyProblem, q: Tensor, k: Tensor, v: Tensor) -> str:
        how = "interpreted by numpy" if self.is_interpreted else target.chip(q.device).name
        return f"linear/delta/triton, {how}"


_CPU = CpuBackend(DELTA, "csrc/cpu/delta", most_steps=16)
"""At 32 heads of 128, float32, two cores with AMX, chunks take 1.3 of the time for 16 tokens and
0.7 for 32."""
_TRITON, _REFERENCE = TritonDelta(DELTA), ReferenceBackend(DELTA, "torch, token by token")
DELTA_BACKENDS: tuple[Backend, ...] = (
    (_CPU, _REFERENCE, _TRITON) if _TRITON.is_interpreted else (_CPU, _TRITON, _REFERENCE)
)

if extension.unavailable_reason() is None:
    register_compiled(DELTA, NAMESPACE)
register_triton(DELTA, f"{__package__}.triton.launch")
