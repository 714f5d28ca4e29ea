"""The gated delta rule: the contract of whole sequences, of packed ones and of steps, derivatives,
transforms and compilers, for every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.backends import ISAS, dtypes_of, forced_isa
from tests.support.case import assert_case
from tests.support.delta import DELTA_CASES, DELTA_NAMES, DELTA_TABLE_WAYS, DeltaCase
from tests.support.linear import operators_of, widest
from tests.support.operators import assert_own_memory
from tests.support.runtime import threads
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.linear.delta.backends import DELTA, DELTA_BACKENDS
from transformer_kernels.linear.delta.types import Inputs, Options

every_backend = pytest.mark.parametrize("backend", DELTA_NAMES)
every_gate = pytest.mark.parametrize("gates", [0, 1, 3])
with_float64 = pytest.mark.parametrize(
    "backend", [name for name in DELTA_NAMES if torch.float64 in dtypes_of(name)]
)
ISAS_AND_DTYPES = tuple((isa, dtype) for isa in ISAS for dtype in dtypes_of("cpu"))
rule: Any = tk.gated_delta_rule
rule_varlen: Any = tk.gated_delta_rule_varlen
step: Any = tk.gated_delta_rule_step


def tensors(T: int = 5, gates: int = 1, *, D: int = 3, **options: Any) -> list[Tensor]:
    """q, k, v, log_decay, beta and a state. `gates` is 0 without a decay, 1 or D."""
    q, k = (torch.randn(1, 2, T, D, **options) / D**0.5 for _ in range(2))
    v, beta = torch.randn(1, 4, T, 2, **options), torch.rand(1, 4, T, **options)
    decay = -torch.rand(1, 4, T, *([D] if gates > 1 else []), **options)
    S = torch.randn(1, 4, D, 2, **options)
    x = [q, k, v, decay * min(gates, 1) - 0.01, beta, S]
    return [t.detach().requires_grad_() for t in x]


def call(backend: str, **options: Any) -> Any:
    def run(*x: Tensor) -> Any:
        return rule(*x[:5], initial_state=x[5], return_state=True, backend=backend, **options)

    return run


@pytest.mark.exhaustive
@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "backend", "dtype", "device"), crossed(DELTA_CASES, DELTA_TABLE_WAYS)
)
def test_case(case: DeltaCase, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, backend, device)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "isa", "dtype"), crossed(DELTA_CASES, ISAS_AND_DTYPES))
def test_instruction_sets(case: DeltaCase, isa: str, dtype: torch.dtype) -> None:
    with forced_isa(isa):
        assert_case(case, dtype, "cpu")


@every_backend
@pytest.mark.parametrize("cut", [1, 64, 90])
def test_a_state_continues_a_sequence(cut: int, backend: str) -> None:
    x = tensors(131, 3, dtype=widest(backend))
    whole = call(backend)(*x)
    grads = torch.autograd.grad(whole[0].sin().sum() + whole[1].sum(), x)
    parts, state = [], x[5]
    for rows in (slice(0, cut), slice(cut, 131)):
        o, state = call(backend)(*(t[:, :, rows] for t in x[:5]), state)
        parts.append(o)
    got = torch.cat(parts, dim=2), state
    assert_same_function(got, whole)
    assert_same_function(torch.autograd.grad(got[0].sin().sum() + got[1].sum(), x), grads)


@every_backend
def test_without_beta_nothing_is_learned(backend: str) -> None:
    q, k, v, decay, beta, S = (t.detach() for t in tensors(70))
    o, end = rule(q, k, v, None, 0 * beta, initial_state=S, return_state=True, backend=backend)
    assert torch.equal(end, S)
    assert_same_function(o, q.repeat_interleave(2, dim=1) @ S / 3**0.5)
    _, end = rule(q, k, v, decay, 0 * beta, initial_state=S, return_state=True, backend=backend)
    assert_same_function(end, S * decay.sum(-1).exp()[..., None, None])


@every_backend
@pytest.mark.parametrize("clear", [-1000.0, -math.inf])
def test_a_decay_that_clears_the_state(clear: float, backend: str) -> None:
    """Each token sees itself alone, and the decay has no gradient."""
    q, k, v, decay, beta, S = tensors(70)
    decay = torch.full_like(decay, clear, requires_grad=True)
    o = rule(q, k, v, decay, beta, scale=0.7, initial_state=S, backend=backend)
    weight = (q * k).sum(-1).repeat_interleave(2, dim=1)
    assert_same_function(o, 0.7 * (beta * weight)[..., None] * v)
    (gradient,) = torch.autograd.grad(o.sum(), decay)
    assert not gradient.any()


@every_backend
def test_orthonormal_keys_are_recalled(backend: str) -> None:
    """A later value replaces the earlier one of the same key."""
    k = torch.eye(8).repeat(9, 1)[None, None]
    v = torch.randn(1, 1, 72, 5)
    ones = torch.ones(1, 1, 72)
    o, end = rule(k, k, v, None, ones, scale=1, return_state=True, backend=backend)
    assert_same_function(o, v)
    assert_same_function(end, v[:, :, 64:])


@every_backend
def test_later_tokens_change_no_earlier_row(backend: str) -> None:
    q, k, v, decay, beta, _ = (t.detach() for t in tensors(150))
    before = rule(q, k, v, decay, beta, backend=backend)
    v[:, :, 140:] = 1e3
    after = rule(q, k, v, decay, beta, backend=backend)
    assert torch.equal(before[:, :, :140], after[:, :, :140])
    for x in (q, k, v):
        x[:, :, 128:] = math.nan
    after = rule(q, k, v, decay, beta, backend=backend)
    assert_same_function(after[:, :, :128], before[:, :, :128])
    assert after[:, :, 128:].isnan().all()


@every_backend
def test_without_sequences(backend: str) -> None:
    q, k, v, decay, beta, _ = (t[0].transpose(0, 1) for t in tensors(9))
    starts = torch.tensor([0])
    o, end = rule_varlen(q, k, v, decay, beta, starts, return_state=True, backend=backend)
    assert not o.any()
    assert end.shape == (0, 4, 3, 2)


@every_backend
def test_values_after_the_last_sequence_are_not_checked(backend: str) -> None:
    q, k, v, decay, beta, _ = (t[0].transpose(0, 1).detach() for t in tensors(9))
    starts = torch.tensor([0, 4])
    expected = rule_varlen(q, k, v, decay, beta, starts, backend=backend)
    decay[4:] = 3.0
    assert torch.equal(rule_varlen(q, k, v, decay, beta, starts, backend=backend), expected)


def test_bits_depend_on_neither_threads_nor_strides_nor_the_batch() -> None:
    x = [t.detach().repeat(3, *(1,) * (t.dim() - 1)) for t in tensors(100, 3)]
    with threads(1):
        whole = rule(*x[:5])
    with threads(3):
        assert torch.equal(rule(*x[:5]), whole)
    strided = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:5])
    assert torch.equal(rule(*strided), whole)
    assert torch.equal(rule(*(t[1:2] for t in x[:5])), whole[1:2])


# Derivatives.


@with_float64
@every_gate
def test_gradcheck(gates: int, backend: str) -> None:
    run = call(backend, l2norm=gates > 1)
    assert gradcheck(run, tensors(5, gates, dtype=torch.float64), check_forward_ad=True)


@pytest.mark.exhaustive
@pytest.mark.quick
@with_float64
@every_gate
def test_gradgradcheck(gates: int, backend: str) -> None:
    run = call(backend, l2norm=gates > 1)
    assert gradgradcheck(run, tensors(3, gates, dtype=torch.float64))


@every_backend
@pytest.mark.parametrize(
    ("output", "leaf"), [*((0, leaf) for leaf in range(6)), *((1, leaf) for leaf in range(1, 6))]
)
def test_gradient_of_one_result_and_input(output: int, leaf: int, backend: str) -> None:
    """The cotangent of the other result is None, which counts as zero."""
    x = [t.detach().requires_grad_(n == leaf) for n, t in enumerate(tensors(70))]
    got, expected = (
        torch.autograd.grad(
            call(name)(*x)[output].cos().sum(), x[leaf], allow_unused=True, materialize_grads=True
        )
        for name in (backend, "reference")
    )
    assert_same_function(got, expected)


@every_backend
def test_same_tensor_as_query_key_and_value(backend: str) -> None:
    x = (torch.randn(1, 2, 70, 4) / 2).requires_grad_()
    beta = torch.rand(1, 2, 70)
    (together,) = torch.autograd.grad(rule(x, x, x, None, beta, backend=backend).sin().sum(), x)
    separate = [x.detach().clone().requires_grad_() for _ in range(3)]
    o = rule(*separate, None, beta, backend=backend)
    assert_same_function(together, sum(torch.autograd.grad(o.sin().sum(), separate)))


@every_backend
def test_vmap(backend: str) -> None:
    """Examples are folded into the batch; gradients of examples differ."""
    many = [torch.stack([a, b, a]) for a, b in zip(tensors(20, 3), tensors(20, 3), strict=True)]
    batched = torch.func.vmap(call(backend))(*many)
    one_by_one = [call(backend)(*(t[n] for t in many)) for n in range(3)]
    assert_same_function(batched, [torch.stack(y) for y in zip(*one_by_one, strict=True)])

    def loss(*x: Tensor) -> Tensor:
        o, end = call(backend)(*x)
        total: Tensor = o.sin().sum() + end.cos().sum()
        return total

    gradient = torch.func.grad(loss, tuple(range(6)))
    got = torch.func.vmap(gradient)(*(t.detach() for t in many))
    singly = [gradient(*(t[n].detach() for t in many)) for n in range(3)]
    assert_same_function(got, [torch.stack(y) for y in zip(*singly, strict=True)])


@every_backend
def test_vmap_of_packed_sequences(backend: str) -> None:
    x = [t[0].transpose(0, 1).detach() for t in tensors(20)[:5]]
    starts = torch.tensor([[0, 7, 20], [0, 0, 15]])
    got = torch.func.vmap(lambda ends: rule_varlen(*x, ends, backend=backend))(starts)
    expected = [rule_varlen(*x, ends, backend=backend) for ends in starts]
    assert_same_function(got, torch.stack(expected))


@every_backend
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, backend: str) -> None:
    x = tensors(30)
    run: Any = checkpoint
    o, _ = run(call(backend), *x, use_reentrant=reentrant)
    o.sin().sum().backward()
    expected = torch.autograd.grad(call(backend)(*x)[0].sin().sum(), x)
    assert_same_function([t.grad for t in x], expected)


def test_steps_have_no_derivative() -> None:
    q, k, v, decay, beta, S = tensors(1)
    with torch.no_grad():
        assert not step(q, k, v, decay, beta, S.detach().clone()).requires_grad
    with pytest.raises(ValueError, match="because gated_delta_rule_step has no backward pass"):
        step(q.detach(), k.detach(), v.detach(), None, beta, S.detach())


# Compilers, modes and operators.


@pytest.mark.exhaustive
@pytest.mark.quick
@every_backend
def test_fullgraph(backend: str) -> None:
    x = tensors(20, 3)
    torch.compiler.reset()
    compiled: Any = torch.compile(call(backend), fullgraph=True, backend="aot_eager")
    eager, fast = call(backend)(*x), compiled(*x)
    assert_same_function(fast, eager)
    cotangents = [torch.randn(y.shape) for y in eager]
    assert_same_function(
        torch.autograd.grad(fast, x, cotangents), torch.autograd.grad(eager, x, cotangents)
    )


def test_dynamic_lengths_compile_once() -> None:
    torch.compiler.reset()
    count = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return graph

    compiled: Any = torch.compile(rule, fullgraph=True, dynamic=True, backend=counting)
    for T in (70, 131, 65):
        x = [t.detach() for t in tensors(T)[:5]]
        assert_same_function(compiled(*x), rule(*x))
    assert count == 1


@every_backend
def test_compiled_steps_update_the_state(backend: str) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    own = torch.randn(1, 4, 3, 2)
    other = own.clone()
    for _ in range(3):
        x = [t.detach() for t in tensors(1)[:5]]
        assert_same_function(compiled(*x, own, backend=backend), step(*x, other, backend=backend))
    assert_same_function(own, other)


class Layer(nn.Module):
    def forward(self, *x: Tensor) -> Any:
        return rule(*x, l2norm=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    x = tuple(t.detach() for t in tensors(70)[:5])
    program = torch.export.export(Layer(), x, strict=strict)
    other = [t.detach() for t in tensors(70)[:5]]
    assert_same_function(program.module()(*other), rule(*other, l2norm=True))
    assert any("delta_forward" in str(node.target) for node in program.graph.nodes)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    x = tensors(30)
    with torch.autocast("cpu", dtype=dtype):
        o, end = call(backend)(*x)
    assert (o.dtype, end.dtype) == (dtype, torch.float32)
    q, k, v = (t.to(dtype) for t in x[:3])
    torch.testing.assert_close(o, call(backend)(q, k, v, *x[3:])[0])
    o.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in x)


@every_backend
def test_gates_in_half_precision(backend: str) -> None:
    """They are cast to the dtype of the state."""
    q, k, v, decay, beta, S = (t.detach() for t in tensors(30))
    x = [t.bfloat16() for t in (q, k, v)]
    got = call(backend)(*x, decay.bfloat16(), beta.bfloat16(), S)
    expected = call(backend)(*x, decay.bfloat16().float(), beta.bfloat16().float(), S)
    assert all(map(torch.equal, got, expected))


def test_fake_mode() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 2, 70, 8, requires_grad=True) for _ in range(2))
        v, gates = torch.empty(2, 4, 70, 6), torch.empty(2, 4, 70)
        o, end = rule(q, k, v, gates, gates, return_state=True)
        assert (o.shape, end.shape) == ((2, 4, 70, 6), (2, 4, 8, 6))
        packed = [x[0].transpose(0, 1) for x in (q, k, v, gates, gates)]
        starts = torch.zeros(3, dtype=torch.int32)
        for backend in ("auto", "reference"):
            assert rule_varlen(*packed, starts, backend=backend).shape == (70, 4, 6)


@pytest.mark.parametrize("backend", [b for b in DELTA_BACKENDS if b.name in DELTA_NAMES[:1]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(backend: Any, dtype: torch.dtype) -> None:
    forward, backward, steps = operators_of(backend)
    q, k, v, decay, beta, S = (t.detach() for t in tensors(70))
    real = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (t.to(dtype) for t in (q, k, v))
    decay, beta, S = (t.to(real) for t in (decay[..., None], beta, S))
    tests = ("test_schema", "test_faketensor")
    for state in (S, None):
        arguments = DELTA.pack(Inputs(q, k, v, decay, beta, state), Options(0.5, l2norm=True))
        torch.library.opcheck(forward, arguments, test_utils=tests)
        o, end = forward(*arguments)
        given = (torch.randn_like(o), end, *arguments)
        torch.library.opcheck(backward, given, test_utils=tests)
        assert_own_memory((o, end, *backward(*given)))
    token = (*(t[:, :, :1] for t in (q, k, v, decay, beta)), S, 0.5, True)
    torch.library.opcheck(steps, token, test_utils=tests)


def test_explain() -> None:
    q, k, v, decay, beta, S = tensors(9)
    report = tk.explain(q, k, v, decay, beta, operator=tk.gated_delta_rule)
    assert report.chosen == "cpu"
    assert "q (1, 2, 9, 3)  k (1, 2, 9, 3)  v (1, 4, 9, 2)" in str(report)
    assert "csrc/cpu/delta" in str(report)
    packed = [x[0].transpose(0, 1) for x in (q, k, v, decay, beta)]
    starts = torch.tensor([0, 4, 9])
    report = tk.explain(*packed, starts, operator=tk.gated_delta_rule_varlen, backend="reference")
    assert report.chosen == "reference"
    assert "(varlen)" in str(report)
    x = [t.detach() for t in (q, k, v, decay, beta, S)]
    report = tk.explain(*x, operator=tk.gated_delta_rule_step)
    assert report.chosen == "cpu"
    assert torch.equal(x[5], S)


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta", "S"])
def test_freed_memory_is_refused(name: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    log_decay, beta, S = -torch.rand(1, 2, 5, 1), torch.rand(1, 2, 5), torch.zeros(1, 2, 8, 8)
    x = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "S": S}
    rows = (q, k, v, log_decay[..., 0], beta)
    x[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its storage is freed"):
        tk.gated_delta_rule(*rows, initial_state=S)
    with pytest.raises(ValueError, match="its storage is freed"):
        tk.gated_delta_rule_step(*rows, S)
    with pytest.raises(RuntimeError, match="it was freed"):
        torch.ops.transformer_kernels.delta_forward(q, k, v, log_decay, beta, S, None, 1.0, False)
