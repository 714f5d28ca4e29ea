"""`linear_attention_decode` continues a sequence token by token, in a state of constant size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DTYPES
from tests.support.isas import ISAS, forced_isa
from tests.support.linear import LINEAR_NAMES, LINEAR_WAYS
from tests.support.tiers import crossed, each
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.linear.feature_maps import FEATURE_MAPS
from transformer_kernels.problem.types import accumulate_dtype

attend: Any = tk.linear_attention

decode: Any = tk.linear_attention_decode

B, H_q, H_kv, N, D, D_v = 2, 4, 2, 40, 7, 5
ZEROS = torch.zeros(2, 2, 7)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head": {"decay": (H_kv,), "normalize": False},
    "token": {"decay": (B, H_kv, N), "feature_map": "relu", "eps": 0.5},
    "callable": {"feature_map": lambda x: torch.cat([x.exp(), (-x).exp()], dim=-1)},
}


def call(dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    rest = dict(options)
    sizes = rest.pop("decay", None)
    decay = None if sizes is None else -torch.rand(sizes).to(accumulate_dtype(dtype))
    q, k, v = (
        torch.randn(B, heads, N, width).to(dtype)
        for heads, width in ((H_q, D), (H_kv, D), (H_kv, D_v))
    )
    return [q, k, v], rest | {"log_decay": decay}


def zeros(dtype: torch.dtype, options: dict[str, Any]) -> tk.LinearState:
    width = D * (2 if callable(options.get("feature_map")) else 1)
    real = accumulate_dtype(dtype)
    S = torch.zeros(B, H_kv, width, D_v, dtype=real)
    return tk.LinearState(S, torch.zeros(B, H_kv, width, dtype=real))


def in_steps(
    x: list[Tensor], rest: dict[str, Any], state: tk.LinearState, size: int, backend: str
) -> Tensor:
    outputs = []
    for first in range(0, N, size):
        rows = slice(first, first + size)
        decay = rest["log_decay"]
        if decay is not None and decay.dim() == 3:
            decay = decay[:, :, rows]
        step = rest | {"log_decay": decay, "backend": backend}
        outputs.append(decode(*(t[:, :, rows] for t in x), state, **step))
    return torch.cat(outputs, dim=2)


def assert_continues(backend: str, dtype: torch.dtype, options: dict[str, Any], size: int) -> None:
    x, rest = call(dtype, options)
    state = zeros(dtype, options)
    o = in_steps(x, rest, state, size, backend)
    wide = {n: y.double() if isinstance(y, Tensor) else y for n, y in rest.items()}
    exact, end = attend(*(t.double() for t in x), **wide, return_state=True, backend="reference")
    plain, plain_end = attend(*x, **rest, return_state=True, backend="reference")
    assert_within_rule("o", o, exact, plain)
    assert_within_rule("S", state.S, end.S, _of_rounded_operands(x, rest))
    assert_within_rule("z", state.z, end.z, plain_end.z)


def _of_rounded_operands(x: list[Tensor], rest: dict[str, Any]) -> Tensor:
    """S of plain torch with phi(k), decayed, in the dtype of the inputs, summed in float32 or
    float64: chunks on AMX round their operands."""
    feature_map = rest.get("feature_map", "elu")
    phi = feature_map if callable(feature_map) else FEATURE_MAPS[feature_map]
    k, v, real = phi(x[1]), x[2], accumulate_dtype(x[1].dtype)
    if rest["log_decay"] is not None:
        decay = rest["log_decay"].double()
        sums = (decay if decay.dim() == 3 else decay[None, :, None].expand(B, H_kv, N)).cumsum(-1)
        k = k * (sums[..., -1:] - sums).exp().to(k.dtype)[..., None]
    return k.to(real).mT @ v.to(real)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", [1, 32, 33])
@pytest.mark.parametrize(("options", "backend", "dtype"), crossed(OPTIONS, LINEAR_WAYS))
def test_continues_a_sequence(options: str, backend: str, dtype: torch.dtype, size: int) -> None:
    assert_continues(backend, dtype, OPTIONS[options], size)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa: str, dtype: torch.dtype) -> None:
    with forced_isa(isa):
        assert_continues("cpu", dtype, OPTIONS["head"], 2)


@pytest.mark.parametrize("backend", LINEAR_NAMES)
def test_no_tokens_and_no_batch(backend: str) -> None:
    state = zeros(torch.float32, {})
    q, k, v = (torch.randn(B, H_kv, 0, width) for width in (D, D, D_v))
    assert decode(q, k, v, state, backend=backend).shape == (B, H_kv, 0, D_v)
    assert not state.S.any()
    empty = tk.LinearState(state.S[:0], state.z[:0])
    q, k, v = (torch.randn(0, H_kv, 1, width) for width in (D, D, D_v))
    assert decode(q, k, v, empty, backend=backend).shape == (0, H_kv, 1, D_v)


@each(
    ("change", "message"),
    [
        ({"state": None}, "state must be a LinearState"),
        ({"state": (torch.zeros(2, 2, 5, 7).mT, ZEROS)}, "state.S must be contiguous"),
        ({"state": (torch.zeros(2, 2, 7, 5).double(), ZEROS)}, "must be float32"),
        ({"q": torch.zeros(2, 2, 1, 7).requires_grad_()}, "because linear_attention_decode has no"),
        ({"q": torch.zeros(2, 2, 2, 7)}, "as many queries as keys"),
        ({"eps": -1}, "eps must be greater than 0"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    state = tk.LinearState(torch.zeros(2, 2, 7, 5), torch.zeros(2, 2, 7))
    given: dict[str, Any] = {"q": torch.zeros(2, 2, 1, 7), "k": torch.zeros(2, 2, 1, 7)}
    given |= {"v": torch.zeros(2, 2, 1, 5), "state": state}
    with pytest.raises((TypeError, ValueError), match=message):
        decode(**(given | change))


def test_gradients_are_refused_in_grad_mode_only() -> None:
    q = torch.zeros(2, 2, 1, 7, requires_grad=True)
    state = tk.LinearState(torch.zeros(2, 2, 7, 5), torch.zeros(2, 2, 7))
    with torch.no_grad():
        o = decode(q, q, torch.ones(2, 2, 1, 5), state)
    assert not o.requires_grad
