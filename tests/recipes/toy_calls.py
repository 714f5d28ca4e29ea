"""Calls with both toys, compared with plain torch in float64. test_recipes.py runs these tests in
the copy that has the toys; pytest does not collect them here, by the name of this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import transformer_kernels
from building.emulated import Emulation
from building.extension import ROOT
from tests.recipes import toy_tree
from tests.support import emulator, triton_interpreter
from tests.support.operators import operator_arguments
from tests.support.plain import plain_attention
from transformer_kernels import _C
from transformer_kernels.backends import schema
from transformer_kernels.backends.native import direct
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.dispatch.operators import register_attention
from transformer_kernels.problem.dense import dense_problem

tk: Any = transformer_kernels  # a type checker of the project does not know the toys
LIBRARY = Emulation().library
torch.ops.load_library(ROOT / toy_tree.EMULATED)
register_attention(LIBRARY)
emulator.emulate(LIBRARY)
triton_interpreter.install()

B, H_Q, H_KV, M, N, D = 2, 4, 2, 70, 83, 21
CU_SEQLENS_Q, CU_SEQLENS_K = (0, 5, 47, 70), (0, 19, 66, 83)
CACHE_SEQLENS = (83, 41)
SHIFT, SOFTCAP = 1.5, 2.0
PAIRS = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    ("triton", torch.float32),
    ("cuda", torch.float16),
    ("reference", torch.float32),
]
DECODING = [pair for pair in PAIRS if pair[0] != "triton"]  # which has no kernels for it
Outputs = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, Tensor]]


class Case(NamedTuple):
    """Options of a dense call."""

    shift: float = 0.0
    softcap: float | None = None
    steps: tuple[int, ...] = ()
    causal: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"shift": self.shift, "softcap": self.softcap, "mask": self.mask}

    @property
    def mask(self) -> Any:
        mask = tk.Mask.causal() if self.causal else tk.Mask()
        for step in self.steps:
            mask = mask & tk.Mask.stripes(step)
        return mask

    @property
    def visible(self) -> Tensor:
        i, j = torch.arange(M)[:, None], torch.arange(N)
        visible = j <= i if self.causal else torch.ones(M, N, dtype=torch.bool)
        for step in self.steps:
            visible = visible & ((i + j) % step == 0)
        return visible

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return plain_call(q, k, v, self.visible, self.shift, self.softcap)


CASES = {
    "shift": Case(SHIFT),
    "shift and softcap": Case(-SHIFT, SOFTCAP, causal=True),
    "stripes": Case(steps=(3,)),
    "queries without a key": Case(steps=(97,)),
    "all": Case(SHIFT, SOFTCAP, (2, 3), causal=True),
}


def draw(*sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def dense_inputs(dtype: torch.dtype, queries: int = M) -> list[Tensor]:
    return draw((B, H_Q, queries, D), (B, H_KV, N, D), (B, H_KV, N, D), dtype=dtype)


def plain_call(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, shift: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    bias = torch.tensor(shift)
    return plain_attention(q, k, v, visible=visible, bias=bias, softcap=softcap)


def outputs(call: Call, inputs: list[Tensor], dtype: torch.dtype) -> Outputs:
    """o, lse and the gradients of a call with the inputs in this dtype."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    o, lse = call(*leaves)
    do, dlse = draw(o.shape, lse.shape, dtype=inputs[0].dtype)
    dq, dk, dv = torch.autograd.grad((o, lse), leaves, (do.to(o.dtype), dlse.to(lse.dtype)))
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def check(got: Outputs, plain: Call, inputs: list[Tensor]) -> None:
    """Asserts the tolerance rule."""
    exact, rounded = (outputs(plain, inputs, x) for x in (torch.float64, inputs[0].dtype))
    rounded["lse"] = outputs(plain, inputs, torch.float32)["lse"]
    lse = exact["lse"]
    largest = float(lse[lse.isfinite()].abs().max())
    for name, value in got.items():
        assert_within_rule(name, value, exact[name], rounded[name], lse=largest)


def test_tables_and_schemas_have_the_toys() -> None:
    """tests/problem/test_fields.py compares the tables of both languages."""
    kinds = {name: kind for name, kind, _, _ in _C.FIELDS}
    assert (kinds["shift"], kinds["stripe_step"]) == ("float", "SymInt")
    for namespace in ("transformer_kernels", LIBRARY):
        operators = getattr(torch.ops, namespace)
        assert str(operators.attention_forward.default._schema).endswith(schema.FORWARD)
        assert str(operators.attention_backward.default._schema).endswith(schema.BACKWARD)
    assert "float shift" in schema.FORWARD
    assert "SymInt stripe_step" in schema.FORWARD


@pytest.mark.parametrize(("backend", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention(case: Case, backend: str, dtype: torch.dtype) -> None:
    inputs = dense_inputs(dtype)

    def call(*x: Tensor) -> Any:
        return tk.attention(*x, **case.options, backend=backend, return_lse=True)

    check(outputs(call, inputs, dtype), case.plain, inputs)
    assert tk.explain(*inputs, **case.options, backend=backend).chosen == backend


@pytest.mark.parametrize(("backend", "dtype"), PAIRS, ids=str)
def test_varlen(backend: str, dtype: torch.dtype) -> None:
    inputs = draw((M, H_Q, D), (N, H_KV, D), (N, H_KV, D), dtype=dtype)
    offsets = torch.tensor(CU_SEQLENS_Q), torch.tensor(CU_SEQLENS_K)
    options: dict[str, Any] = {"shift": SHIFT, "mask": tk.Mask.causal(), "backend": backend}

    def call(*x: Tensor) -> Any:
        return tk.attention_varlen(*x, *offsets, **options, return_lse=True)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for (i0, i1), (j0, j1) in zip(pairwise(CU_SEQLENS_Q), pairwise(CU_SEQLENS_K), strict=True):
            visible = torch.ones(i1 - i0, j1 - j0, dtype=torch.bool).tril()
            q_rows, k_rows, v_rows = (
                x.transpose(0, 1)[None] for x in (q[i0:i1], k[j0:j1], v[j0:j1])
            )
            parts.append(plain_call(q_rows, k_rows, v_rows, visible, SHIFT))
        o, lse = (torch.cat(one, dim=2)[0] for one in zip(*parts, strict=True))
        return o.transpose(0, 1), lse

    check(outputs(call, inputs, dtype), one_by_one, inputs)
    explained = tk.explain(*inputs, *offsets, **options, operator=tk.attention_varlen)
    assert explained.chosen == backend


@pytest.mark.parametrize(("backend", "dtype"), DECODING, ids=str)
def test_decode(backend: str, dtype: torch.dtype) -> None:
    inputs, lengths = dense_inputs(dtype, queries=3), torch.tensor(CACHE_SEQLENS)
    options: dict[str, Any] = {"shift": SHIFT, "softcap": SOFTCAP, "backend": backend}
    o, lse = tk.attention_decode(*inputs, lengths, **options, return_lse=True)
    last = lengths[:, None, None, None] - 3 + torch.arange(3)[:, None]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return plain_call(q, k, v, torch.arange(N) <= last, SHIFT, SOFTCAP)

    check({"o": o, "lse": lse}, plain, inputs)
    explained = tk.explain(*inputs, lengths, **options, operator=tk.attention_decode)
    assert explained.chosen == backend


def test_direct_call() -> None:
    """The readers of direct calls take the new fields."""
    inputs, case = dense_inputs(torch.float32), CASES["all"]
    q, k, v = inputs
    problem = dense_problem(q, k, v, **case.options)
    options = problem.scores, problem.mask, problem.layout
    block_mask = torch.empty(problem.mask.block_mask_shape(M, N), dtype=torch.uint8)
    o, row_stats = torch.empty_like(q), torch.empty(2, B, H_Q, M)
    answer = direct.launch_forward(q, k, v, *options, block_mask, True, o, row_stats, True)
    assert answer is None
    check({"o": o, "lse": row_stats[0]}, case.plain, inputs)


def test_plain_calls_have_no_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, lengths = dense_inputs(torch.float32, queries=3), torch.tensor(CACHE_SEQLENS)
    taken: list[object] = []
    monkeypatch.setattr(direct, "launch_forward", lambda *x: taken.append(x))
    tk.attention(*inputs, shift=SHIFT)
    tk.attention_decode(*inputs, lengths, shift=SHIFT)
    assert taken == []


@pytest.mark.parametrize("namespace", ["transformer_kernels", LIBRARY])
def test_fake_outputs(namespace: str) -> None:
    q, k, v = dense_inputs(torch.float16)
    arguments = operator_arguments(q, k, v, shift=SHIFT, stripe_step=3)
    operator = getattr(torch.ops, namespace).attention_forward.default
    torch.library.opcheck(operator, tuple(arguments.values()), test_utils="test_faketensor")


def test_compiled_call() -> None:
    inputs, options = dense_inputs(torch.float32), CASES["all"].options

    def call(*x: Tensor) -> Any:
        return tk.attention(*x, **options, backend="cpu", return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, expected = (outputs(one, inputs, torch.float32) for one in (compiled, call))
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
