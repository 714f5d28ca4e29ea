"""Packed documents: our kernels and torch's `varlen_attn`, checked on the first documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.gpu_cases import PackedCase
from benchmarks.runner.checks import attention_contenders
from transformer_kernels import Mask, attention_varlen
from transformer_kernels.bench import Attend, Direction, Inputs, run_once
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.trial import failure_reason

CHECKED_DOCUMENTS = 3
TOLERANCE = 0.03
"""Largest error relative to the largest value, in bfloat16"""
Maker = Callable[[PackedCase], Attend]


class PackedContenders:
    """Contenders of a case, checked when they are created."""

    def __init__(self, case: PackedCase, makers: Mapping[str, Maker]) -> None:
        """Creates the contenders of our kernels, by variant, and of torch.

        `skipped` has the reasons of those that fail or are wrong.
        """
        self._case = case
        self.skipped: dict[str, str] = {}
        self._errors: dict[str, float] = {}
        self._makers = {**makers, "torch varlen": torch_varlen}
        few = case.first(CHECKED_DOCUMENTS)
        inputs = few.inputs()
        exact = run_once(by("reference")(few), Inputs(*(x.double() for x in inputs)))
        for name, make in self._makers.items():

            def attempt(name: str = name, make: Maker = make) -> None:
                error = run_once(make(few), inputs).error(exact, "fwd+bwd")
                assert error < TOLERANCE, f"error {error:.2g} of the largest value"
                self._errors[name] = error

            if (reason := failure_reason(attempt)) is not None:
                self.skipped[name] = reason

    def contenders(self, direction: Direction) -> list[Contender]:
        """Returns the variants that passed."""
        case = self._case
        attends = {name: self._makers[name](case) for name in self._errors}
        return attention_contenders(case, direction, attends, case.inputs(), self._errors)


def by(backend: str) -> Maker:
    """`Variant.attend_for` of `attention_varlen`."""

    def attend_for(case: PackedCase) -> Attend:
        cu_seqlens, longest = case.cu_seqlens(), max(case.lengths)
        return _of_one_entry(
            partial(
                attention_varlen,
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                mask=Mask.causal(),
                backend=backend,
            )
        )

    return attend_for


def torch_varlen(case: PackedCase) -> Attend:
    """`Variant.attend_for` of torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = case.cu_seqlens(), max(case.lengths)
    return _of_one_entry(
        partial(
            varlen_attn,
            cu_seq_q=cu_seqlens,
            cu_seq_k=cu_seqlens,
            max_q=longest,
            max_k=longest,
            window_size=(-1, 0),
        )
    )


def _of_one_entry(attend: Callable[..., Any]) -> Attend:
    """Packed rows are (tokens, H, D), inputs of cases (1, H, tokens, D)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = attend(*(x[0].transpose(0, 1) for x in (q, k, v)))
        return o.transpose(0, 1)[None]

    return call
