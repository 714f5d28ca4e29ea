"""Linear attention on a GPU: contenders of the suite `gpu`.

Causal: "linear" is phi = elu + 1, normalized; "linear: sums" is phi(x) = x without the denominator,
the kernel of flash-linear-attention alone. Its chunked kernel runs if the package fla-core is
installed; phi is computed for it by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases.gpu import causal, gpu_case
from benchmarks.runner.gpu_check import failure_reason
from benchmarks.runner.measure import Contender
from transformer_kernels import linear_attention
from transformer_kernels.bench import (
    VARIANTS,
    Attend,
    Case,
    Direction,
    Inputs,
    prepare_work,
    run_once,
)

NORMALIZED, SUMS = "linear", "linear: sums"
CHECKED_TOKENS = 1024
"""Tokens that are checked; earlier results do not depend on later tokens."""
TOLERANCE = 0.03
"""Largest error relative to the largest value: bfloat16 operands, and results of bfloat16"""


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """A case whose operations are those of the recurrence."""

    def operations(self, direction: Direction) -> float:
        """Forward: update and product of the state. Backward: the state again, and dS; do S^T, v
        dS^T and phi(k) dS."""
        products = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[direction]
        return 2.0 * products * self.B * self.H_q * self.N * self.D * self.D_v


def linear_cases() -> list[Case]:
    """Cases for both kinds, most informative first."""
    sizes = [(4096, 128), (16384, 64), (1024, 64)]
    return [
        LinearCase(**(vars(gpu_case(NORMALIZED, S, D)) | {"name": name}))
        for S, D in sizes
        for name in (NORMALIZED, SUMS)
    ]


class LinearContenders:
    """Contenders of one case; each is checked for correctness when it is created."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs = case.inputs()
        self.skipped: dict[str, str] = {}
        """variants that cannot run the case, with their reasons"""
        self._attends: dict[str, Attend] = {}
        self._errors: dict[str, float] = {}
        self._few = Inputs(*(x[:, :, :CHECKED_TOKENS] for x in self.inputs))
        wide = Inputs(*(x.double() for x in self._few))
        self._exact = run_once(ours(case, "reference"), wide)

    def add(self, name: str, make: Callable[[], Attend]) -> None:
        """Adds a variant, or its reason in `skipped` if it is not installed, fails or is wrong."""

        def attempt() -> None:
            attend = make()
            error = run_once(attend, self._few).error(self._exact, "fwd+bwd")
            assert error < TOLERANCE, f"error {error:.2g} of the largest value"
            self._attends[name], self._errors[name] = attend, error

        try:
            reason = failure_reason(attempt)
        except ImportError as error:
            reason = str(error)
        if reason is not None:
            self.skipped[name] = reason

    def contenders(self, direction: Direction) -> list[Contender]:
        """Returns the variants that were added, and causal attention of the same sizes."""
        added = [
            Contender(
                case=self.case, direction=direction, variant=name,
                prepare=prepare_work(attend, self.inputs, direction), error=self._errors[name],
            )
            for name, attend in self._attends.items()
        ]  # fmt: skip
        softmax = causal(self.case.N, self.case.D).to(self.case.device)
        attend = VARIANTS["sdpa"].attend_for(softmax)
        return [
            *added,
            Contender(
                case=softmax, direction=direction, variant="sdpa",
                prepare=prepare_work(attend, self.inputs, direction), error=float("nan"),
            ),
        ]  # fmt: skip


def ours(case: Case, backend: str) -> Attend:
    if case.name == SUMS:
        return partial(linear_attention, feature_map="identity", normalize=False, backend=backend)
    return partial(linear_attention, backend=backend)


def fla(case: Case) -> Attend:
    """The chunked kernel of flash-linear-attention, whose tensors are (B, L, H, D)."""
    from fla.ops.linear_attn import chunk_linear_attn

    normalize = case.name == NORMALIZED

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if normalize:
            q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o: Tensor = chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)[0]
        return o.transpose(1, 2)

    return attend
