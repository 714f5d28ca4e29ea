"""The contract of the depthwise causal convolution and of its steps, against an explicit loop in
float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DTYPES, ISAS, forced_isa
from tests.support.operators import operators_run_by
from tests.support.runtime import threads
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.linear.convolution import CONV

convolve: Any = tk.causal_conv1d
step: Any = tk.causal_conv1d_step
every_backend = pytest.mark.parametrize("backend", ["cpu", "reference"])

Layout = Literal["first", "last", "strided"]
FIRST_AND_LAST: tuple[Layout, Layout] = ("first", "last")


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor | None

    def differentiable(self) -> list[Tensor]:
        return [t for t in self if t is not None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. x lies between NaN in memory."""

    T: int = 65
    B: int = 2
    C: int = 5
    W: int = 4
    bias: bool = True
    state: bool = True
    activation: str | None = "silu"
    layout: Layout = "first"
    packed: tuple[int, ...] = ()
    """lengths of packed sequences; B and T are not used"""
    trailing: int = 0
    """tokens after them, NaN"""

    def __str__(self) -> str:
        given = {n: x for n, x in vars(self).items() if x != getattr(Case, n)}
        return "-".join(f"{name}={x}" for name, x in given.items()) or "default"

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.packed or (self.T,) * self.B

    def inputs(self, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        total, C, h = sum(self.packed) + self.trailing, self.C, self.W - 1
        x = draw(1, C, total) if self.packed else draw(self.B, C, self.T)
        if self.packed:
            x[:, :, sum(self.packed) :] = math.nan
        bias = draw(C) if self.bias else None
        state = lay_out(draw(len(self.lengths), C, h), "strided") if self.state else None
        return Inputs(lay_out(x, self.layout), draw(C, self.W), bias, state)

    def run(self, x: Inputs, backend: str) -> tuple[Tensor, Tensor]:
        offsets = torch.tensor([0, *accumulate(self.packed)]) if self.packed else None
        y, state = convolve(
            *x[:3], activation=self.activation, initial_state=x.state, return_state=True,
            cu_seqlens=offsets, backend=backend,
        )  # fmt: skip
        return y, state

    def loop(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The definition, token by token."""
        if not self.packed:
            parts = [(x.x[b], b) for b in range(self.B)]
        else:
            ends = pairwise(accumulate((0, *self.packed)))
            parts = [(x.x[0, :, first:end], b) for b, (first, end) in enumerate(ends)]
        results = [self._sequence(part, x, b) for part, b in parts]
        if not results:
            return x.x, x.x.expand(0, self.C, self.T)[:, :, : self.W - 1]
        ys, ends_of = zip(*results, strict=True)
        if not self.packed:
            return torch.stack(ys), torch.stack(ends_of)
        padding = x.x.new_zeros(self.C, self.trailing)
        return torch.cat([*ys, padding], dim=1)[None], torch.stack(ends_of)

    def _sequence(self, x: Tensor, given: Inputs, b: int) -> tuple[Tensor, Tensor]:
        before = x.new_zeros(self.C, self.W - 1) if given.state is None else given.state[b]
        joined = torch.cat([before, x], dim=1)
        columns = [joined[:, :0]]
        for t in range(x.shape[1]):
            u = (joined[:, t : t + self.W] * given.weight).sum(1)
            u = u if given.bias is None else u + given.bias
            columns.append((u * torch.sigmoid(u) if self.activation else u)[:, None])
        return torch.cat(columns, dim=1), joined[:, x.shape[1] :]


CASES = [
    *(Case(T=T, layout=layout) for T in (0, 1, 2, 3, 7) for layout in FIRST_AND_LAST),
    *(Case(W=W, layout=FIRST_AND_LAST[W % 2]) for W in (2, 3, 5, 7, 8)),
    *(Case(layout=layout) for layout in ("first", "last", "strided")),
    Case(bias=False),
    Case(state=False, layout="last"),
    Case(activation=None),
    Case(activation="swish", bias=False, state=False),
    *(Case(C=300, B=1, layout=layout) for layout in FIRST_AND_LAST),
    Case(C=17, T=530, B=1, W=8),
    Case(C=1, T=40, layout="last"),
    Case(C=0),
    Case(B=0),
    *(
        Case(packed=(5, 0, 1, 2, 70, 0), trailing=3, layout=layout, state=layout == "last")
        for layout in FIRST_AND_LAST
    ),
    Case(packed=(0, 0), trailing=2),
    Case(packed=(0,), trailing=0),
]  # fmt: skip


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """Returns x in memory of this layout, between NaN."""
    B, C, T = x.shape
    base = {"first": (B, C, T + 2), "last": (B, T, C + 2), "strided": (B, T, 2, C, 3)}[layout]
    memory = x.new_full(base, math.nan)
    y = {
        "first": lambda: memory[:, :, 1:-1],
        "last": lambda: memory[:, :, 1:-1].mT,
        "strided": lambda: memory[:, :, 1, :, 1].mT,
    }[layout]()
    return y.copy_(x)


def with_gradients(results: Any, x: Inputs, cotangents: list[Tensor]) -> list[Tensor]:
    given, pairs = x.differentiable(), zip(results, cotangents, strict=True)
    ys, gs = zip(*((y, g) for y, g in pairs if y.requires_grad), strict=True)
    return [*results, *torch.autograd.grad(ys, given, gs, materialize_grads=True)]


def assert_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    x = case.inputs(dtype)
    exact = Inputs._make(None if t is None else t.double().requires_grad_() for t in x)
    x = Inputs._make(None if t is None else t.requires_grad_() for t in x)
    results, expected = case.run(x, backend), case.loop(exact)
    cotangents = [torch.randn(y.shape).to(dtype) for y in expected]
    wanted = with_gradients(expected, exact, [g.double() for g in cotangents])
    if case.trailing:
        cotangents[0][:, :, -case.trailing :] = math.nan  # must not be read
    got = with_gradients(results, x, cotangents)
    plain = with_gradients(case.run(x, "reference"), x, cotangents)
    names = ("y", "state", "dx", "dweight", "dbias" if case.bias else "dstate", "dstate")
    for name, *each in zip(names, got, wanted, plain, strict=False):
        one, *others = each
        assert one.dtype == dtype
        assert_within_rule(name, one, *others)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "backend", "dtype"),
    crossed(CASES, [(backend, dtype) for backend in ("cpu", "reference") for dtype in DTYPES]),
)
def test_case(case: Case, backend: str, dtype: torch.dtype) -> None:
    assert_case(case, dtype, backend)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "isa", "dtype"), crossed(CASES, [(isa, dtype) for isa in ISAS for dtype in DTYPES])
)
def test_instruction_sets(case: Case, isa: str, dtype: torch.dtype) -> None:
    with forced_isa(isa):
        assert_case(case, dtype, "cpu")


@pytest.mark.exhaustive
@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", FIRST_AND_LAST)
def test_work_is_divided_by_tokens(layout: Layout) -> None:
    """Results are the same bits in every run, but the sums dweight and dbias only with the same
    number of threads."""
    case = Case(T=1100, C=20, layout=layout)
    results = []
    for count in (1, 3, 3):
        with threads(count):
            assert_case(case, torch.float64, "cpu")
            given = case.inputs(torch.float32)
            x = Inputs._make(None if t is None else t.requires_grad_() for t in given)
            y = case.run(x, "cpu")
            results.append(with_gradients(y, x, [torch.ones_like(t) for t in y]))
    one, three, again = results
    assert all(map(torch.equal, three, again))
    same = [torch.equal(*pair) for pair in zip(one, three, strict=True)]
    assert same == [True, True, True, False, False, True]


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["first", "last", "strided"])
def test_x_is_not_copied(layout: Layout) -> None:
    x, weight, bias, state = Case(layout=layout).inputs(torch.bfloat16)
    ran = operators_run_by(lambda: convolve(x, weight, bias, initial_state=state))
    assert not ran.keys() & {"aten::clone", "aten::copy_"}
    y = convolve(x, weight)
    assert y.is_contiguous() if layout == "first" else y.mT.is_contiguous()


@pytest.mark.quick
@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_steps_continue_a_sequence(tokens: int, dtype: torch.dtype, backend: str) -> None:
    case = Case(T=2 * tokens, layout="last")
    x, weight, bias, state = case.inputs(dtype)
    assert state is not None
    whole, end = case.run(Inputs(x, weight, bias, state), backend)
    parts = [
        step(part, weight, bias, state, activation="silu", backend=backend)
        for part in x.split(tokens, dim=2)
    ]
    assert_same_function(torch.cat(parts, dim=2), whole)
    assert torch.equal(state, end)
    one = step(x[:, :, 0], weight, bias, state, activation="silu", backend=backend)
    assert one.shape == x.shape[:2]


@pytest.mark.quick
@every_backend
def test_a_nan_stays_in_its_channel_and_window(backend: str) -> None:
    x, weight = torch.randn(1, 3, 70), torch.randn(3, 4, requires_grad=True)
    for T in (9, 70):
        one = x[:, :, :T].clone()
        one[0, 1, T - 2] = math.nan
        one.requires_grad_()
        y = convolve(one, weight, backend=backend)
        assert y.isnan().nonzero().tolist() == [[0, 1, T - 2], [0, 1, T - 1]]
        dx, dweight = torch.autograd.grad(y, (one, weight), torch.ones_like(y))
        assert not dx.isnan().any()
        assert dweight.isnan().nonzero().tolist() == [[1, 2], [1, 3]]


@pytest.mark.exhaustive
@pytest.mark.quick
@pytest.mark.parametrize("packed", [(), (4, 0, 1)], ids=str)
def test_derivatives_of_any_order(packed: tuple[int, ...]) -> None:
    case = Case(T=5, B=1, C=2, W=3, packed=packed)
    x = case.inputs(torch.float64)
    given = [t.requires_grad_() for t in x.differentiable()]

    def call(*given: Tensor) -> Any:
        return case.run(Inputs(*given), "auto")

    torch.autograd.gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.quick
def test_vmap() -> None:
    x, weight, bias, _ = Case().inputs(torch.float64)
    many = torch.randn(3, *x.shape, dtype=x.dtype)
    weights = torch.randn(3, *weight.shape, dtype=x.dtype)

    def loss(x: Tensor, weight: Tensor) -> Any:
        return convolve(x, weight, bias, activation="silu").square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(many, weights)
    each = [
        torch.func.grad(loss, argnums=(0, 1))(*pair) for pair in zip(many, weights, strict=True)
    ]
    assert_same_function(got, [torch.stack(grads) for grads in zip(*each, strict=True)])
    got = torch.vmap(lambda x: convolve(x, weight, bias))(many)
    assert_same_function(got, torch.stack([convolve(x, weight, bias) for x in many]))


@pytest.mark.quick
def test_compiled_code() -> None:
    x, weight, bias, state = Case(layout="last").inputs(torch.float32)
    assert state is not None
    state = state.contiguous()
    offsets = torch.tensor([0, 4, 9])
    x.requires_grad_()

    def call(x: Tensor, state: Tensor) -> Any:
        y, end = convolve(x, weight, bias, activation="silu", return_state=True)
        packed = convolve(x[:1], weight, initial_state=state, cu_seqlens=offsets)
        return y, end, packed

    torch.compiler.reset()
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(x, state), call(x, state)
    assert_same_function(got, wanted)
    assert got[0].stride() == wanted[0].stride()
    grads = [torch.autograd.grad(y[0].sum() + y[2].sum(), x) for y in (got, wanted)]
    assert_same_function(*grads)
    with torch.no_grad():
        other = state.clone()
        steps: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert_same_function(steps(x, weight, bias, state), step(x, weight, bias, other))
        assert torch.equal(state, other)


@pytest.mark.exhaustive
@pytest.mark.quick
def test_operators() -> None:
    x, weight, bias, state = Case(T=5).inputs(torch.float32)
    assert state is not None
    operators = [getattr(torch.ops.transformer_kernels, name).default for name in CONV.names]
    for operator, wanted in zip(operators, CONV.schemas, strict=True):
        assert str(operator._schema).partition("(")[2] == wanted.removeprefix("(")
    arguments = (x.requires_grad_(), weight.requires_grad_(), bias, state, None, True)
    torch.library.opcheck(operators[0], arguments)
    torch.library.opcheck(operators[1], (torch.randn_like(x), None, *arguments))
    torch.library.opcheck(operators[2], (x.detach(), weight.detach(), bias, state, True))


@pytest.mark.quick
def test_dtypes_of_weights_and_autocast() -> None:
    """Sums are float32, and float32 weights are not rounded."""
    case = Case(state=False)
    x, weight, bias, _ = case.inputs(torch.float32)
    assert bias is not None
    half = x.bfloat16()
    weight.requires_grad_()
    y = convolve(half, weight, bias, activation="silu")
    assert y.dtype == torch.bfloat16
    assert_same_function(y, convolve(half.float(), weight, bias, activation="silu").bfloat16())
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    assert dweight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(convolve(x, weight, bias, activation="silu"), y)


@pytest.mark.quick
def test_explain() -> None:
    x, weight, bias, state = Case().inputs(torch.float32)
    report = tk.explain(x, weight, operator=convolve)
    assert str(report).startswith("x (2, 5, 65)  weight (5, 4)  torch.float32 on cpu")
    assert "csrc/cpu/conv" in str(report)
    assert tk.explain(x[:, :, 0], weight, bias, state, operator=step).chosen == "cpu"
    on_meta = tk.explain(x.to("meta"), weight.to("meta"), operator=convolve)
    assert on_meta.chosen == "reference"
