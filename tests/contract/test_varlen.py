"""`attention_varlen` equals `attention` of each sequence, with or without trailing padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import transformer_kernels as tk
from tests.support.backends import DTYPES, ISAS, TABLE_WAYS, WITH_FLOAT64, forced_isa
from tests.support.case import assert_case, named
from tests.support.masks import CAUSAL_END, Window
from tests.support.operators import BACKWARD, FORWARD, operators_run_by
from tests.support.tiers import crossed
from tests.support.varlen_cases import VARLEN_CASES, VarlenCase
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.scores import philox

LENGTHS = (5, 0, 70, 33)
STARTS = torch.tensor([0, 5, 5, 75, 108])
TOTAL, H, D = 108, 2, 16
Options = dict[str, Any]
Triple = tuple[Tensor, Tensor, Tensor]


def qkv(dtype: torch.dtype = torch.float32) -> Triple:
    q, k, v = (torch.randn(TOTAL, H, D, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), crossed(VARLEN_CASES, TABLE_WAYS))
def test_case(case: VarlenCase, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, backend, device)


def test_dropout_mask_equals_that_of_the_batch_entry(backend: str) -> None:
    """With v = identity, o holds the kept weights. The backward pass uses the same bits."""
    starts = torch.tensor([0, 40, 40, 64])
    q, k = torch.zeros(64, H, 4), torch.zeros(64, H, 4)
    v = torch.cat([torch.eye(40), torch.eye(24, 40)])[:, None].repeat(1, H, 1).requires_grad_()
    o = tk.attention_varlen(q, k, v, starts, dropout_p=0.5, seed=9, backend=backend)
    (dv,) = torch.autograd.grad(o[:24, :, 0].sum() + o[40:, :, 0].sum(), v)
    kept = philox.keep_mask(torch.tensor(9), 3, H, 40, 40, 0.5)
    assert torch.equal(o[:40] != 0, kept[0].transpose(0, 1))
    assert torch.equal(o[40:, :, :24] != 0, kept[2, :, :24, :24].transpose(0, 1))
    assert torch.equal(dv[40:, :, 0] != 0, kept[2, :, :24, :24].any(dim=1).T)


def test_dropout_follows_the_generator(backend: str) -> None:
    tensors = qkv()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(tk.attention_varlen(*tensors, STARTS, dropout_p=0.5, backend=backend))
    assert torch.equal(*draws)
    assert not torch.equal(
        draws[0], tk.attention_varlen(*tensors, STARTS, dropout_p=0.5, backend=backend)
    )


def test_slices_of_packed_qkv_are_read_in_place() -> None:
    packed = torch.randn(TOTAL, 3, H, D)
    q, k, v = packed.unbind(1)
    starts = STARTS.int()
    ran = operators_run_by(lambda: tk.attention_varlen(q, k, v, starts, backend="cpu"))
    assert ran[FORWARD] == 1
    # The copy is one of `starts`, which another thread may write.
    assert (ran["aten::clone"], ran["aten::copy_"]) == (1, 1)


def test_gradient_of_packed_qkv(backend: str) -> None:
    packed = torch.randn(TOTAL, 3, H, D, requires_grad=True)
    copies = [x.detach().clone().requires_grad_() for x in packed.unbind(1)]
    o, expected = (
        tk.attention_varlen(q, k, v, STARTS, backend=backend)
        for q, k, v in (packed.unbind(1), copies)
    )
    assert torch.equal(o, expected)
    do = torch.randn(TOTAL, D, H).transpose(1, 2)
    (got,) = torch.autograd.grad(o, packed, do)
    assert torch.equal(got, torch.stack(torch.autograd.grad(expected, copies, do), dim=1))


def test_no_sequences(backend: str) -> None:
    q, k, v = qkv()
    sinks = torch.zeros(H, requires_grad=True)
    o, lse = tk.attention_varlen(
        q, k, v, torch.tensor([0]), sinks=sinks, return_lse=True, backend=backend
    )
    assert torch.equal(o, torch.zeros(TOTAL, H, D))
    assert torch.equal(lse, torch.full((H, TOTAL), -math.inf))
    grads = torch.autograd.grad(o.sum(), (q, k, v, sinks))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_no_rows(backend: str) -> None:
    q, k, v = (torch.zeros(0, heads, D, requires_grad=True) for heads in (4, 2, 2))
    for starts in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        o, lse = tk.attention_varlen(q, k, v, starts, return_lse=True, backend=backend)
        assert (o.shape, lse.shape) == ((0, 4, D), (4, 0))
        assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [
            q.shape,
            *[k.shape] * 2,
        ]


def test_dtypes_and_strides_of_cu_seqlens(backend: str) -> None:
    """int32 and int64, non-contiguous, and max_seqlen given exactly or as an upper bound."""
    tensors = qkv()
    expected = tk.attention_varlen(*tensors, STARTS, STARTS, backend=backend)
    for starts in (STARTS.int(), STARTS.repeat_interleave(2)[::2]):
        assert torch.equal(tk.attention_varlen(*tensors, starts, backend=backend), expected)
    for longest in (70, 512):
        o = tk.attention_varlen(
            *tensors, STARTS, max_seqlen_q=longest, max_seqlen_k=longest, backend=backend
        )
        assert torch.equal(o, expected)


@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_output_shapes_and_dtypes(backend: str) -> None:
    for dtype in DTYPES:
        q, k, v = qkv(dtype)
        o, lse = tk.attention_varlen(q, k, v, STARTS, return_lse=True, backend=backend)
        assert (o.shape, o.dtype) == ((TOTAL, H, D), dtype)
        assert lse.shape == (H, TOTAL)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert tk.attention_varlen(*qkv(), STARTS, backend="cpu").is_contiguous()


@pytest.mark.skipif(
    not memory_can_be_measured(), reason="peak memory cannot be measured on this system"
)
def test_memory_is_linear() -> None:
    """The full score matrix would be 128 MiB; q, k and v are 1.5 MiB."""
    q, k, v = (torch.randn(4096, 2, 16, requires_grad=True) for _ in range(3))
    starts = torch.arange(0, 4097, 8)

    def work() -> object:
        o = tk.attention_varlen(q, k, v, starts, backend="cpu")
        return torch.autograd.grad(o.sum(), (q, k, v))

    peak = peak_extra_bytes(lambda: work)
    assert peak is not None
    assert peak < 16 << 20


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", named(VARLEN_CASES, "causal", "multi-query", "tokens"), ids=str)
def test_thread_counts_are_bit_identical(case: VarlenCase) -> None:
    """Short sequences run on one thread each, long ones on several threads."""
    x = case.inputs(torch.float32)
    results = []
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        results.append(case.run(x, "cpu"))
    for other in results[1:]:
        assert torch.equal(other["o"], results[0]["o"])
        assert torch.equal(other["lse"], results[0]["lse"])
        assert_same_function(other, results[0])


@pytest.mark.usefixtures("poisoned", "threads")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    with forced_isa(isa):
        for case in named(VARLEN_CASES, "dropout", "multi-query", "tokens", "alibi-end"):
            assert_case(case, torch.float32, "cpu")


@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_gradients_are_bit_identical_across_runs(backend: str) -> None:
    (case,) = named(VARLEN_CASES, "alibi")
    x = case.inputs(torch.float32)
    first, second = (case.run(x, backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


SMALL_OPTIONS: dict[str, Options] = {
    "plain": {},
    "causal": {"mask": tk.Mask.causal(align="bottom_right")},
    "dropout": {"dropout_p": 0.4, "seed": 7, "softcap": 0.8},
    "alibi": {"bias": tk.alibi(torch.tensor([0.5, 0.25], dtype=torch.float64))},
}


@pytest.mark.quick
@pytest.mark.parametrize("options", SMALL_OPTIONS.values(), ids=SMALL_OPTIONS)
@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_derivatives(options: Options, backend: str) -> None:
    """First and second order and forward mode, with an empty sequence and trailing padding."""
    q = torch.randn(6, 2, 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(5, 1, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(5, 1, 1, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cu_q, cu_k = torch.tensor([0, 2, 3, 5]), torch.tensor([0, 3, 3, 5])

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = tk.attention_varlen(
            q, k, v, cu_q, cu_k, **options, sinks=sinks, return_lse=True, backend=backend
        )
        return o, torch.where(lse.isneginf(), 0.0, lse)

    assert gradcheck(call, (q, k, v, sinks), check_forward_ad=True)
    assert gradgradcheck(call, (q, k, v, sinks), check_fwd_over_rev=True, fast_mode=True)


def test_slopes_are_differentiable() -> None:
    q, k, v = (x.detach() for x in qkv(torch.float64))
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda slopes: tk.attention_varlen(q, k, v, STARTS, bias=tk.alibi(slopes)),
        (slopes,),
        fast_mode=True,
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fullgraph(dynamic: bool) -> None:
    """With max_seqlen_q given, forward and backward are one graph each."""
    sinks = torch.randn(H)

    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        return tk.attention_varlen(
            q, k, v, starts, max_seqlen_q=70, mask=tk.Mask.causal(), dropout_p=0.2, seed=5,
            sinks=sinks, return_lse=True, backend="cpu",
        )  # fmt: skip

    torch.compiler.reset()
    fast = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    tensors = qkv()
    for starts in (STARTS, torch.tensor([0, 20, 50, 60, 60])):
        eager, compiled = call(*tensors, starts), fast(*tensors, starts)
        assert_same_function(compiled, eager)
        assert_same_function(
            torch.autograd.grad(compiled[0].sin().sum(), tensors),
            torch.autograd.grad(eager[0].sin().sum(), tensors),
        )
    ran = operators_run_by(lambda: torch.autograd.grad(fast(*tensors, STARTS)[0].sum(), tensors))
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)


def test_autocast(backend: str) -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        o = tk.attention_varlen(q, k.half(), v, STARTS, backend=backend)
    halves: Triple = (q.bfloat16(), k.half().bfloat16(), v.bfloat16())
    assert torch.equal(o, tk.attention_varlen(*halves, STARTS, backend=backend))
    grads = torch.autograd.grad(o.float().sum(), (q, k, v))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_unbounded_window_has_no_align(backend: str) -> None:
    (case,) = named(VARLEN_CASES, "causal-end")
    x = case.inputs(torch.float32)
    unbounded = replace(case, mask=(Window(), CAUSAL_END))
    o, expected = (one.run(x, backend)["o"] for one in (unbounded, case))
    assert torch.equal(o, expected)
