"""Linear attention on a GPU: contenders of the suite `gpu`.

The chunked kernel of flash-linear-attention runs if the package fla-core is installed; torch
computes phi for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases.gpu import LINEAR, LINEAR_SUMS, causal
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
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.trial import failure_reason

CHECKED_TOKENS = 1024
"""Tokens that are checked; earlier results do not depend on later tokens."""
TOLERANCE = 0.03
"""Largest error relative to the largest value: bfloat16 operands, and results of bfloat16"""


class LinearContenders:
    """Contenders of one case; those of linear attention are checked when they are added."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs = case.inputs()
        self.skipped: dict[str, str] = {}
        """variants that cannot run the case, with their reasons"""
        self._added: dict[str, tuple[Attend, float]] = {}
        self._few = Inputs(*(x[:, :, :CHECKED_TOKENS] for x in self.inputs))
        wide = Inputs(*(x.double() for x in self._few))
        self._exact = run_once(ours(case, "reference"), wide)

    def add(self, name: str, make: Callable[[], Attend]) -> None:
        """Adds a variant, or its reason in `skipped` if it is not installed, fails or is wrong."""

        def attempt() -> None:
            attend = make()
            error = run_once(attend, self._few).error(self._exact, "fwd+bwd")
            assert error < TOLERANCE, f"error {error:.2g} of the largest value"
            self._added[name] = attend, error

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
                prepare=prepare_work(attend, self.inputs, direction), error=error,
            )
            for name, (attend, error) in self._added.items()
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
    if case.name == LINEAR_SUMS:
        return partial(linear_attention, feature_map="identity", normalize=False, backend=backend)
    return partial(linear_attention, backend=backend)


def fla(case: Case) -> Attend:
    """The chunked kernel of flash-linear-attention, whose tensors are (B, L, H, D)."""
    from fla.ops.linear_attn import chunk_linear_attn

    normalize = case.name == LINEAR

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if normalize:
            q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o: Tensor = chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)[0]
        return o.transpose(1, 2)

    return attend
