"""Parts of a call with dropout, which begin at a row, a column and a head of the undivided call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.support.oracle import plain_attention
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
        scores = problem.scores._replace(
            dropout_row=self.row, dropout_column=self.column, dropout_head=self.head
        )
        return replace(problem, scores=scores)

    def kept(self) -> Tensor:
        """The bits (2, H_q, M, N) of the undivided call."""
        sizes = 2, self.head + self.H_q, self.row + self.M, self.column + self.N
        undivided = keep_mask(torch.tensor(SEED), *sizes, P)
        return undivided[:, self.head :, self.row :, self.column :]


ALL = {"row": 48, "column": 80, "head": 2}
SMALL = (
    Part("one-query", row=176, column=64, head=3, M=1, N=300),
    Part("few-queries", **ALL, M=4, N=600),
    Part("heads-in-a-tile", **ALL, H_q=8, H_kv=1, M=3, N=100),
    Part("heads-in-a-block", **ALL, H_q=8, H_kv=2, M=30, N=100),
)
PARTS = (
    Part("rows", row=16, N=192),
    Part("columns", column=112),
    Part("heads", head=1),
    Part("all", **ALL),
    *SMALL,
)
HOPPER = (*PARTS, *(Part(f"width-{D}", **ALL, N=192, D=D) for D in (64, 128, 256)))


def assert_part(part: Part, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """o and the gradients follow the tolerance rule, with the bits of the undivided call."""
    q, do = (torch.randn(2, part.H_q, part.M, part.D, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, part.H_kv, part.N, part.D, dtype=dtype) for _ in range(2))
    exact, plain = (_by_plain_torch(part, x, q, k, v, do) for x in (torch.float64, dtype))
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    problem = part.of(dense_problem(*inputs, dropout_p=P, seed=SEED))
    o, lse = run(problem, *inputs, sinks=None, backend=backend)
    got = (o.detach(), *torch.autograd.grad(o, inputs, do.to(device)))
    largest = float(lse.detach().abs().max())
    for name, *values in zip(("o", "dq", "dk", "dv"), got, exact, plain, strict=True):
        assert_within_rule(name, *(x.cpu() for x in values), lse=largest)


def _by_plain_torch(
    part: Part, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    o, _ = plain_attention(*inputs, keep_mask=part.kept(), dropout_p=P)
    return (o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype)))


def kept_by(part: Part, backend: str, device: str = "cpu") -> Tensor:
    """The kept weights (2, H_q, M, N), observed through v = identity."""
    q = torch.zeros(2, part.H_q, part.M, 8, device=device)
    k = torch.zeros(2, part.H_q, part.N, 8, device=device)
    v = torch.eye(part.N, device=device).expand(2, part.H_q, part.N, part.N)
    problem = part.of(dense_problem(q, k, v, dropout_p=P, seed=SEED))
    return run(problem, q, k, v, sinks=None, backend=backend)[0] != 0


def assert_undivided_bits(backend: str, device: str = "cpu") -> None:
    """Parts keep the weights that the undivided call keeps."""
    whole = kept_by(Part("whole", H_q=3, M=192, N=256), backend, device)
    for row, column, head in ((0, 64, 1), (32, 112, 0), (96, 192, 2)):
        part = Part("part", row, column, head, H_q=1, M=91, N=64)
        expected = whole[:, head : head + 1, row : row + 91, column : column + 64]
        assert torch.equal(kept_by(part, backend, device), expected), part
