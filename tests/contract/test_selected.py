"""Selected keys: calls that gather the listed keys, and those that run with an element mask.

The tables of cases cover the element mask, forward and backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, DECODERS_AND_DTYPES, operators_of
from tests.support.case import assert_case
from tests.support.cases import Case
from tests.support.masks import CAUSAL_END, KeyRange, Selected, Window
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import gather
from transformer_kernels.problem.dense import dense_problem

_LONG: dict[str, Any] = {"N": 1021, "D": 24, "D_v": 17, "requires_grad": (), "hidden": "nan"}
GATHERED = (
    Case(name="one-query", M=1, mask=Selected(100), softcap=1.5, sinks=True, **_LONG),
    Case(
        name="groups", M=5, H_q=8, H_kv=2, layout="transposed", **_LONG,
        mask=(Selected(60), CAUSAL_END, KeyRange(start=(300, 0, 7), end=(1000, 900, 0))),
    ),
    Case(
        name="heads", B=1, M=3, **_LONG,
        mask=(Selected(30, dims="h"), Window(700, 0, "bottom_right")),
    ),
    Case(name="pages", M=3, H_q=6, H_kv=1, mask=Selected(3, 32), scale=0.3, **_LONG | {"N": 1056}),
    Case(name="no-pages", M=70, H_q=8, H_kv=1, mask=(Selected(2, 32), CAUSAL_END), **_LONG),
    Case(name="empty-lists", M=3, mask=Selected(0), **_LONG),
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_calls_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_CALL", 0.0)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", GATHERED, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), DECODERS_AND_DTYPES)
def test_gathered(
    case: Case, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_ENTRIES", 64)  # several calls
    x = case.inputs(dtype)
    explained = tk.explain(*case.arguments(x), **case.options(x), backend=backend)
    gathers = str(explained.kernel).startswith("gathers the selected keys: ")
    assert gathers == (backend != "reference")
    assert explained.chosen == backend
    assert_case(case, dtype, backend)


def inputs() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 500, 8), torch.randn(1, 2, 500, 8)
    return (q, k, v), torch.randint(500, (1, 3, 9))


def is_gathered(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    return "gathers" in str(tk.explain(q, k, v, **options).kernel)


def test_calls_that_are_not_gathered() -> None:
    qkv, indices = inputs()
    lists = tk.Mask.selected(indices)
    assert is_gathered(*qkv, mask=lists)
    assert tk.explain(*qkv, mask=lists).general_path == "selected keys"
    others: tuple[dict[str, Any], ...] = (
        {"bias": tk.alibi(torch.ones(4))},
        {"relative": tk.relative_bias(torch.zeros(4, 3), lowest=0)},
        {"dropout_p": 0.5},
        {"mask": lists & tk.Mask.segments(torch.zeros(1, 3).int(), torch.zeros(1, 500).int())},
        {"mask": tk.Mask.selected(torch.arange(500).expand(1, 3, -1))},
        {"mask": lists, "backend": "reference"},
    )
    for options in others:
        assert not is_gathered(*qkv, **{"mask": lists} | options)
    qkv[0].requires_grad_()
    with torch.no_grad():
        assert is_gathered(*qkv, mask=lists)
    assert not is_gathered(*qkv, mask=lists)


def test_heads_of_a_group_with_the_same_lists() -> None:
    qkv, indices = inputs()
    lists = torch.stack([indices, indices.flip(2), indices + 1, indices + 1], dim=1) % 500
    shared, other = lists.clone(), lists.clone()
    other[:, 3, 0, 0] = (other[:, 3, 0].max() + 1) % 500
    for given, gathers in ((shared, True), (other, False)):
        mask = tk.Mask.selected(given)
        assert is_gathered(*qkv, mask=mask) == gathers
        dense = tk.Mask.dense(mask.materialize(1, 4, 3, 500))
        got, wanted = (tk.attention(*qkv, mask=one, return_lse=True) for one in (mask, dense))
        assert_same_function(got, wanted)


@pytest.mark.parametrize("backend", {"cuda"} & {*COMPILED_BACKENDS})
def test_operators_refuse_lists(backend: str) -> None:
    """The backend refuses them before; an operator may be called without it."""
    qkv, indices = inputs()
    problem = dense_problem(*qkv, mask=tk.Mask.selected(indices))
    with pytest.raises(RuntimeError, match="selected is not supported by the CUDA kernels"):
        operators_of(backend).attention_forward(*qkv, *problem.pack())


@pytest.mark.exhaustive
@pytest.mark.parametrize("needs_grad", [False, True])
def test_compiled(needs_grad: bool) -> None:
    qkv, indices = inputs()
    leaves = [one.requires_grad_(needs_grad) for one in qkv]

    def attend(indices: Tensor) -> Tensor:
        return tk.attention(*qkv, mask=tk.Mask.selected(indices) & tk.Mask.window(100, None))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = [one(indices) for one in (compiled, attend)]
    assert_same_function(*results)
    past = torch.tensor([500, 12345]).expand(1, 3, 2)  # selects nothing where values are not read
    assert torch.equal(compiled(torch.cat([indices, past], dim=-1)), results[0])
    if needs_grad:
        got, wanted = (torch.autograd.grad(o.sum(), leaves) for o in results)
        assert_same_function(got, wanted)


def test_transforms() -> None:
    qkv, indices = inputs()
    batch = torch.stack([indices, indices * 7 % 500])

    def attend(indices: Tensor, q: Tensor) -> Tensor:
        return tk.attention(q, *qkv[1:], mask=tk.Mask.selected(indices))

    got = torch.vmap(attend, (0, None))(batch, qkv[0])
    assert_same_function(got, torch.stack([attend(one, qkv[0]) for one in batch]))
    tangent = torch.func.jvp(lambda q: attend(batch[0], q), qkv[:1], qkv[:1])[1]
    q = qkv[0].requires_grad_()
    (expected,) = torch.autograd.grad(attend(batch[0], q), q, torch.ones_like(tangent))
    assert torch.allclose((expected * q).sum(), tangent.sum(), rtol=1e-3, atol=1e-4)
