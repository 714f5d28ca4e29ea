"""torch.compile, torch.export, opcheck, autocast and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.backends import (
    COMPILED_AND_DTYPES,
    COMPILED_BACKENDS,
    NAMES,
    WITH_FLOAT64,
    operators_of,
)
from tests.support.case import named
from tests.support.cases import CASES, Case
from tests.support.operators import BACKWARD, FORWARD, assert_own_memory, operators_run_by
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.problem.cache import cache_problem
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.problem.varlen import one_entry, varlen_problem
from transformer_kernels.scores.options import DIFFERENTIABLE

B, H, M, N, D = 2, 2, 67, 71, 8
Options = dict[str, Any]
COMPILED = (
    *("all-masks", "bias-1hmn", "sinks-empty-rows", "gqa-everything", "alibi", "softcap"),
    *("alibi-learns", "relative", "relative-everything", "keys", "keys-everything"),
)


def qkv(N: int = N) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, H, length, D, requires_grad=True) for length in (M, N, N))
    return q, k, v


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **options})


@pytest.mark.quick
@pytest.mark.parametrize(("name", "backend"), crossed(COMPILED, ((one,) for one in NAMES)))
def test_fullgraph(name: str, backend: str) -> None:
    """Forward and backward are one graph each, and equal the eager results."""
    (case,) = named(CASES, name)
    x = case.inputs(torch.float32)
    options = case.options(x)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = tk.attention(q, k, v, **options, backend=backend)
        return outputs

    def gradients(o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        outputs, cotangents = [o], [x.do]
        if x.dlse is not None:
            outputs, cotangents = [o, lse], [x.do, x.dlse]
        return torch.autograd.grad(outputs, list(x.differentiable().values()), cotangents)

    eager, fast = call(x.q, x.k, x.v), compiled(call)(x.q, x.k, x.v)
    assert_same_function(fast, eager)
    assert_same_function(gradients(*fast), gradients(*eager))


@pytest.mark.exhaustive
def test_inductor() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = tk.attention(q * 2, k, v, mask=tk.Mask.causal(), backend="cpu")
        return torch.nn.functional.gelu(o).sum()

    tensors = qkv()
    fast = compiled(step, backend="inductor")
    assert_same_function(fast(*tensors), step(*tensors))
    assert_same_function(
        torch.autograd.grad(fast(*tensors), tensors), torch.autograd.grad(step(*tensors), tensors)
    )
    ran = operators_run_by(lambda: torch.autograd.grad(fast(*tensors), tensors))
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)


def test_same_tensor_in_two_arguments(backend: str) -> None:
    """As query, key and value, and as the ids of queries and of keys."""
    x = torch.randn(B, H, M, D, requires_grad=True)
    mask = tk.Mask.segments(torch.arange(M).expand(B, -1) // 20)

    def call(x: Tensor) -> Tensor:
        return tk.attention(x, x, x, mask=mask, backend=backend)

    eager, fast = call(x), compiled(call)(x)
    assert_same_function(fast, eager)
    do = torch.randn_like(eager)
    assert_same_function(torch.autograd.grad(fast, x, do), torch.autograd.grad(eager, x, do))


@pytest.mark.quick
def test_dynamic_lengths_compile_once(backend: str) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = tk.Mask.causal(align="bottom_right")
        return tk.attention(q, k, v, mask=mask, backend=backend)

    fast = compiled(call, backend=count, dynamic=True)
    for length in (71, 90, 133):
        tensors = [x.detach() for x in qkv(length)]
        assert_same_function(fast(*tensors), call(*tensors))
    assert graphs == 1


@pytest.mark.quick
def test_compiled_dropout_follows_the_generator(backend: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.attention(q, k, v, dropout_p=0.5, backend=backend)

    tensors = [x.detach() for x in qkv()]
    fast = compiled(call)
    torch.manual_seed(1)
    first, second = fast(*tensors), fast(*tensors)
    torch.manual_seed(1)
    assert torch.equal(fast(*tensors), first)
    assert not torch.equal(first, second)


class Layer(nn.Module):
    """Attention layer with a learned bias."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, M, M))
        self.backend = backend

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = tk.Mask.causal() & tk.Mask.padding(lengths)
        return tk.attention(x, x, x, mask=mask, bias=self.bias, backend=self.backend)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, backend: str) -> None:
    layer, x, lengths = Layer(backend), torch.randn(B, H, M, D), torch.tensor([M, 40])
    exported = torch.export.export(layer, (x, lengths), strict=strict).module()
    other_lengths = torch.tensor([12, M])
    assert_same_function(exported(x, other_lengths), layer(x, other_lengths))
    ran = operators_run_by(lambda: exported(x, lengths))
    assert (ran[FORWARD] > 0) == (backend == "cpu")


OPERATOR_OPTIONS: dict[str, Options] = {
    "plain": {},
    "causal": {"mask": tk.Mask.causal()},
    "bias": {"bias": torch.randn(1, H, M, 1), "softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "seed": 4},
    "alibi": {"bias": tk.alibi(torch.ones(H))},
    "relative": {"relative": tk.relative_bias(torch.randn(H, 9), lowest=-4)},
    "keys": {"relative": tk.relative_keys(torch.randn(1, 9, D), lowest=-4)},
    "keys-and-table": {
        "relative": tk.relative_keys(torch.randn(H, 9, D), table=torch.randn(1, 9), lowest=-4)
    },
    "block_mask": {
        "mask": tk.Mask.dense(torch.rand(M, N) < 0.5)
        & tk.Mask.segments(torch.ones(B, M).long(), torch.ones(B, N).long())
        & tk.Mask.key_range(torch.tensor([0, 3]), torch.tensor([N, 60]))
    },
    "layout": {"mask": tk.Mask.block_sparse(torch.rand(H, 5, 5) < 0.5, 16)},
    "varlen": {"mask": tk.Mask.causal(align="bottom_right"), "dropout_p": 0.3, "seed": 4},
    "decode": {},
    "decode-alibi": {"bias": tk.alibi(torch.ones(H), align="bottom_right"), "softcap": 2.0},
}


def arguments_of_forward(name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the operator with these options, for packed sequences and caches by the name."""
    options = OPERATOR_OPTIONS[name]
    q, k, v = (x.detach().to(dtype) for x in qkv())
    if name == "varlen":
        q, k, v = (x[0].transpose(0, 1)[:M] for x in (q, k, v))
        packed = varlen_problem(q, k, v, torch.tensor([0, 5, 5, 60]), **options)
        return *map(one_entry, (q, k, v)), *packed.pack()
    if name.startswith("decode"):
        table = torch.tensor([[1, 0], [0, 9]])
        return q, k, v, *cache_problem(q, k, v, torch.tensor([N + 2, 1]), table, **options).pack()
    return q, k, v, *dense_problem(q, k, v, **options).pack()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "backend", "dtype"), crossed(OPERATOR_OPTIONS, COMPILED_AND_DTYPES)
)
def test_opcheck(name: str, backend: str, dtype: torch.dtype) -> None:
    """Schema, fake tensors and AOT dispatch, static and dynamic, of both operators."""
    operators = operators_of(backend)
    arguments = arguments_of_forward(name, dtype)
    torch.library.opcheck(operators.attention_forward.default, arguments)
    if name.startswith("decode"):
        return
    q, k, v, *rest = arguments
    o, row_stats, block_mask = operators.attention_forward(*arguments)
    for dlse in (None, torch.randn_like(row_stats[0])):
        saved = (torch.randn_like(o), dlse, q, k, v, o, row_stats, block_mask)
        given = dict(zip((field.name for field in FIELDS), rest, strict=True))
        wanted = (*(given[name] is not None for name in DIFFERENTIABLE), True)
        torch.library.opcheck(operators.attention_backward.default, (*saved, *rest, *wanted))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, name, id=f"{case}-{name}")
        for case in CASES
        for name in COMPILED_BACKENDS
        if not case.reasons(name)
    ],
)
def test_fake_outputs_have_real_shapes_and_strides(case: Case, backend: str) -> None:
    """Fake outputs have the shapes, dtypes and strides of real ones, in every case."""
    x = case.inputs(torch.float32)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    problem = dense_problem(
        q, k, v, mask=case.make_mask(), bias=case.bias_of(x), relative=case.relative_of(x),
        softcap=case.softcap, dropout_p=case.dropout_p, seed=1,
    )  # fmt: skip
    operators = operators_of(backend)
    forward, backward = operators.attention_forward, operators.attention_backward
    options = [x.detach() if isinstance(x, Tensor) else x for x in problem.pack()]
    given = (q, k, v, *options)
    real = forward(*given)
    wanted = (getattr(problem.scores, name) is not None for name in DIFFERENTIABLE)
    back = (x.do, None, q, k, v, *real, *options, *wanted, True)
    real_back = backward(*back)
    assert_own_memory((*real, *real_back))

    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake_back = backward(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in back))
        fake = forward(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given))
    for one, other in zip((*real, *real_back), (*fake, *fake_back), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.numel():
            assert one.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, backend: str) -> None:
    """q, k and v are cast to the autocast dtype; gradients keep the dtype of the inputs."""
    q, k, v = qkv()
    with torch.autocast("cpu", dtype):
        o, lse = tk.attention(q, k.to(dtype), v, return_lse=True, backend=backend)
    expected = tk.attention(q.to(dtype), k.to(dtype), v.to(dtype), backend=backend)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(o, expected)
    grads = torch.autograd.grad(o.float().sum() + lse.sum(), (q, k, v))
    assert all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_autocast_keeps_float64(backend: str) -> None:
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert tk.attention(x, x, x, backend=backend).dtype == torch.float64


def test_autocast_keeps_reference_precision() -> None:
    """Autocast would run the matmuls of the reference in bfloat16."""
    x = torch.randn(1, 1, 64, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = tk.attention(x, x, x, backend="reference")
    assert torch.equal(inside, tk.attention(x, x, x, backend="reference"))


def test_backward_outside_autocast(backend: str) -> None:
    """The usual training step: forward inside, backward outside the autocast block."""
    tensors = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        loss = tk.attention(*tensors, backend=backend).float().square().mean()
    halves = [x.detach().bfloat16().requires_grad_() for x in tensors]
    same = tk.attention(*halves, backend=backend).float().square().mean()
    for got, expected in zip(
        torch.autograd.grad(loss, tensors), torch.autograd.grad(same, halves), strict=True
    ):
        assert torch.equal(got, expected.float())


@pytest.mark.quick
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_reproduces_dropout(reentrant: bool, backend: str) -> None:
    tensors = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tk.attention(q, k, v, dropout_p=0.5, backend=backend)

    def step(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        o = attend(*tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        torch.manual_seed(7)
        again = attend(*leaves)
        assert torch.equal(o, again)
        again.square().sum().backward()
        return tuple(x.grad for x in leaves if x.grad is not None)

    plain = step(call)
    checkpointed = step(lambda *x: checkpoint(call, *x, use_reentrant=reentrant))
    assert len(plain) == len(checkpointed) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
