"""Parts of a call with dropout: the offsets of their rows, columns and heads, in every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, dtypes_of, operators_of
from tests.support.isas import forced_isa
from tests.support.operators import operator_arguments
from tests.support.plain import plain_attention
from transformer_kernels import _C
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.dispatch.run import run
from transformer_kernels.problem import Problem
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.scores.philox import keep_mask

SEED = -1234567890123456789
P = 0.3


@dataclass(frozen=True)
class Part:
    """Rows, columns and heads of a larger call: the first of each, and their numbers."""

    name: str
    row: int = 0
    column: int = 0
    head: int = 0
    H_q: int = 4
    H_kv: int = 2
    M: int = 101
    N: int = 128
    D: int = 16

    def __str__(self) -> str:
        return self.name

    def of(self, problem: Problem) -> Problem:
        """The problem of this part."""
        scores = problem.scores._replace(
            dropout_row=self.row, dropout_column=self.column, dropout_head=self.head
        )
        return replace(problem, scores=scores)

    def kept(self) -> Tensor:
        """The bits (2, H_q, M, N) of the undivided call."""
        sizes = (2, self.head + self.H_q, self.row + self.M, self.column + self.N)
        undivided = keep_mask(torch.tensor(SEED), *sizes, P)
        return undivided[:, self.head :, self.row :, self.column :]


ALL = {"row": 37, "column": 64, "head": 2}
SMALL = (
    Part("one-query", row=191, column=64, head=3, M=1, N=300),
    Part("few-queries", **ALL, M=4, N=600),
    Part("heads-in-a-tile", **ALL, H_q=8, H_kv=1, M=3, N=100),
    Part("heads-in-a-block", **ALL, H_q=8, H_kv=2, M=30, N=100),
)
PARTS = (
    Part("rows", row=37, N=192),
    Part("columns", column=128),
    Part("heads", head=1),
    Part("all", row=37, column=64, head=2),
    *SMALL,
)
HOPPER = (*PARTS, *(Part(f"width-{D}", **ALL, N=192, D=D) for D in (64, 128, 256)))


def sampled(parts: Sequence[Part], *names: str) -> list[ParameterSet]:
    """Returns test parameters; those without these names are `exhaustive`."""
    return [
        pytest.param(part, id=part.name, marks=() if part.name in names else pytest.mark.exhaustive)
        for part in parts
    ]


def assert_part(part: Part, backend: str, dtype: torch.dtype) -> None:
    """o and the gradients follow the tolerance rule, with the bits of the undivided call."""
    q, do = (torch.randn(2, part.H_q, part.M, part.D, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, part.H_kv, part.N, part.D, dtype=dtype) for _ in range(2))
    exact, plain = (by_plain_torch(part, x, q, k, v, do) for x in (torch.float64, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    problem = part.of(dense_problem(*inputs, dropout_p=P, seed=SEED))
    o, lse = run(problem, *inputs, sinks=None, backend=backend)
    got = (o.detach(), *torch.autograd.grad(o, inputs, do))
    largest = float(lse.detach().abs().max())
    for name, *values in zip(("o", "dq", "dk", "dv"), got, exact, plain, strict=True):
        assert_within_rule(name, *values, lse=largest)


def by_plain_torch(
    part: Part, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """o, dq, dk and dv of textbook attention."""
    inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    o, _ = plain_attention(*inputs, keep_mask=part.kept(), dropout_p=P)
    return (o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype)))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(PARTS, "all"))
def test_part(part: Part, backend: str) -> None:
    assert_part(part, backend, torch.float32)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("isa", _C.built_isas())
@pytest.mark.parametrize("part", sampled(PARTS[3:], "heads-in-a-tile"))
def test_part_with_each_instruction_set(part: Part, isa: str) -> None:
    with forced_isa(isa):
        for dtype in dtypes_of("cpu"):
            assert_part(part, "cpu", dtype)


@contextmanager
def emulated_chip(capability: int) -> Iterator[None]:
    if "cuda" not in COMPILED_BACKENDS:
        pytest.skip("the CUDA kernels are not emulated")
    from tests.support import emulator

    with emulator.chip(capability):
        yield


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER, "width-128"))
def test_part_on_hopper(part: Part) -> None:
    """Warps of the producer generate the bits of the backward pass, a query tile ahead."""
    with emulated_chip(90):
        assert_part(part, "cuda", torch.bfloat16)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", sampled(HOPPER[3:], "width-64"))
def test_part_on_ampere(part: Part) -> None:
    with emulated_chip(80):
        assert_part(part, "cuda", torch.bfloat16)


def kept_by(part: Part, backend: str) -> Tensor:
    """The kept weights (2, H_q, M, N), observed through v = identity."""
    q, k = torch.zeros(2, part.H_q, part.M, 8), torch.zeros(2, part.H_q, part.N, 8)
    v = torch.eye(part.N).expand(2, part.H_q, part.N, part.N)
    problem = part.of(dense_problem(q, k, v, dropout_p=P, seed=SEED))
    return run(problem, q, k, v, sinks=None, backend=backend)[0] != 0


def test_parts_have_the_bits_of_the_undivided_call(backend: str) -> None:
    whole = kept_by(Part("whole", H_q=3, M=192, N=256), backend)
    for row, column, head in ((0, 64, 1), (37, 128, 0), (101, 192, 2)):
        part = Part("part", row, column, head, H_q=1, M=91, N=64)
        expected = whole[:, head : head + 1, row : row + 91, column : column + 64]
        assert torch.equal(kept_by(part, backend), expected), part


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ({"dropout_column": 32}, "dropout_column must be a multiple of 64, got 32"),
        ({"dropout_column": -64}, r"dropout_column must be between 0 and 2\^31 - 1, got -64"),
        ({"dropout_row": -1}, r"dropout_row must be between 0 and 2\^31 - 1, got -1"),
        ({"dropout_head": 2**31}, "dropout_head must be between 0 and .*, got 2147483648"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_operators_refuse_other_offsets(offsets: dict[str, int], reason: str, backend: str) -> None:
    q = torch.randn(1, 1, 3, 8)
    arguments = operator_arguments(q, q, q, dropout_p=P, seed=torch.tensor(1), **offsets)
    with pytest.raises(RuntimeError, match=reason):
        operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_packed_sequences_have_no_offsets(backend: str) -> None:
    q, starts = torch.randn(1, 1, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
    arguments = operator_arguments(
        q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3,
        dropout_row=1,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="dropout_row is not supported in a varlen call"):
        operators_of(backend).attention_forward(**arguments)
