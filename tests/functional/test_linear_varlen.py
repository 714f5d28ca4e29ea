"""`linear_attention_varlen` equals `linear_attention` of each sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.linear import LINEAR_NAMES, LINEAR_WAYS, linear_arguments, widest
from tests.support.threads import threads
from tests.support.tiers import crossed, each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.problem.types import accumulate_dtype

attend: Any = tk.linear_attention

attend_varlen: Any = tk.linear_attention_varlen

LENGTHS = (70, 0, 1, 64, 131)
TOTAL, H_q, H_kv, D, D_v = 270, 4, 2, 8, 5  # four rows of trailing padding
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head": {"decay": "head", "state": True},
    "token": {"decay": "token", "normalize": False},
    "all": {"causal": False, "state": True},
}


def starts(dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)


def packed(dtype: torch.dtype, decay: str, *, state: bool) -> dict[str, Tensor]:
    real = accumulate_dtype(dtype)
    x = {
        "q": torch.randn(TOTAL, H_q, D).to(dtype),
        "k": torch.randn(TOTAL, H_kv, D).to(dtype),
        "v": torch.randn(TOTAL, H_kv, D_v).to(dtype),
    }
    if decay:
        sizes = (H_kv,) if decay == "head" else (TOTAL, H_kv)
        x["log_decay"] = -torch.rand(sizes).to(real)
    if state:
        x["S"] = torch.randn(len(LENGTHS), H_kv, D, D_v).to(real)
        x["z"] = torch.rand(len(LENGTHS), H_kv, D).to(real) + 1
    return {name: value.requires_grad_() for name, value in x.items()}


def one_by_one(x: dict[str, Tensor], backend: str, **options: Any) -> tuple[Tensor, ...]:
    outputs, states = [], []
    for b, (first, length) in enumerate(zip(starts().tolist(), LENGTHS, strict=False)):
        rows = slice(first, first + length)
        q, k, v = (x[name][rows].transpose(0, 1)[None] for name in "qkv")
        decay = x.get("log_decay")
        if decay is not None and decay.dim() == 2:
            decay = decay[rows].mT[None]
        state = tk.LinearState(x["S"][b : b + 1], x["z"][b : b + 1]) if "S" in x else None
        o, end = attend(
            q, k, v, log_decay=decay, initial_state=state, return_state=True, backend=backend,
            **options,
        )  # fmt: skip
        outputs.append(o[0].transpose(0, 1))
        states.append(end)
    S, z = (torch.cat(parts) for parts in zip(*states, strict=True))
    padding = outputs[0].new_zeros(TOTAL - sum(LENGTHS), H_q, D_v)
    return torch.cat([*outputs, padding]), S, z


def gradients(x: dict[str, Tensor], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    cotangents = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, list(x.values()), cotangents, materialize_grads=True)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("options", "backend", "dtype"), crossed(OPTIONS, LINEAR_WAYS))
def test_equals_each_sequence_alone(options: str, backend: str, dtype: torch.dtype) -> None:
    rest = dict(OPTIONS[options])
    x = packed(dtype, rest.pop("decay", ""), state=rest.pop("state", False))
    state = tk.LinearState(x["S"], x["z"]) if "S" in x else None
    o, end = attend_varlen(
        x["q"], x["k"], x["v"], starts(), log_decay=x.get("log_decay"), initial_state=state,
        return_state=True, backend=backend, **rest,
    )  # fmt: skip
    expected = one_by_one(x, backend, **rest)
    assert_same_function((o, *end), expected, dtype=dtype)
    assert not o[sum(LENGTHS) :].any()
    assert_same_function(gradients(x, (o, *end)), gradients(x, expected), dtype=dtype)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_few_long_sequences_are_cut_into_segments(backend: str, count: int) -> None:
    dtype = widest(backend)
    x = [torch.randn(2300, 1, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor([0, 1200, 2300])
    decay = torch.tensor([-0.01], dtype=dtype, requires_grad=True)
    with threads(count):
        results = []
        for name in (backend, "reference"):
            o = attend_varlen(*x, cu_seqlens, log_decay=decay, backend=name)
            results.append((o, *torch.autograd.grad(o.sin().sum(), [*x, decay])))
    assert_same_function(results[0], results[1])


@pytest.mark.quick
@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_padding_may_hold_nan(backend: str) -> None:
    x = packed(torch.float32, "", state=False)
    planted = {name: t.detach().clone() for name, t in x.items()}
    for t in planted.values():
        t[sum(LENGTHS) :] = math.nan
        t.requires_grad_()
    o = attend_varlen(**planted, cu_seqlens=starts(), backend=backend)
    clean = attend_varlen(**x, cu_seqlens=starts(), backend=backend)
    assert torch.equal(o, clean)
    grads = torch.autograd.grad(o, list(planted.values()), torch.ones_like(o))
    assert all(g.isfinite().all() for g in grads)
    assert all(not g[sum(LENGTHS) :].any() for g in grads)


@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_without_sequences(backend: str) -> None:
    x = packed(torch.float32, "", state=False)
    o, state = attend_varlen(**x, cu_seqlens=torch.tensor([0]), return_state=True, backend=backend)
    assert not o.any()
    assert state.S.shape == (0, H_kv, D, D_v)


@each(
    ("cu_seqlens", "message"),
    [
        ([1, 5], "cu_seqlens must start at 0, got 1"),
        ([0, 9, 5], "cu_seqlens must not decrease, got 9, then 5 at 2"),
        ([0, 271], "cu_seqlens must end within the 270 rows of q, got 271"),
        ([[0, 1]], r"cu_seqlens must be \(B \+ 1,\)"),
        ([0.0, 1.0], "cu_seqlens must be int32 or int64"),
    ],
)
def test_errors(cu_seqlens: Any, message: str) -> None:
    x = packed(torch.float32, "", state=False)
    with pytest.raises((TypeError, ValueError), match=message):
        attend_varlen(**x, cu_seqlens=torch.tensor(cu_seqlens))


def test_compiled_code_checks_the_values() -> None:
    """The operator itself raises: no kernel reads outside the rows."""
    x = packed(torch.float32, "", state=False)
    q, k, v = (t.detach().transpose(0, 1)[None] for t in x.values())
    for values in ([0, 271], [0, 9, 5], [-1, 5]):
        cu_seqlens = torch.tensor(values, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="cu_seqlens must start at 0, not decrease"):
            torch.ops.transformer_kernels.linear_forward(
                **linear_arguments(q, k, v, cu_seqlens=cu_seqlens)
            )
