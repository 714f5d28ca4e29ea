"""`scaled_dot_product_attention` equals torch's, and of jagged tensors under `enable`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_kernels as tk
from tests.support.backends import not_in_2_11
from tests.support.operators import BACKWARD, FORWARD, operators_run_by
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function

Shape = tuple[int, ...]
Qkv = tuple[Tensor, Tensor, Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def leaves(dtype: torch.dtype = torch.float32) -> Qkv:
    q, k, v = (leaf(2, 2, *shape, dtype=dtype) for shape in ((7, 4), (5, 4), (5, 6)))
    return q, k, v


SHAPES: dict[str, tuple[Shape, Shape, Shape, Shape]] = {
    "2d": ((3, 4), (5, 4), (5, 6), (3, 5)),
    "3d": ((2, 3, 4), (2, 5, 4), (2, 5, 6), (2, 1, 5)),
    "4d": ((3, 2, 7, 4), (3, 2, 5, 4), (3, 2, 5, 6), (3, 1, 7, 5)),
    "4d-keys": ((3, 2, 7, 4), (3, 2, 5, 4), (3, 2, 5, 6), (3, 1, 1, 5)),
    "4d-shared-mask": ((3, 2, 7, 4), (3, 2, 5, 4), (3, 2, 5, 6), (7, 5)),
    "5d": ((2, 3, 2, 7, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 6), (3, 1, 7, 5)),
    "6d": ((2, 1, 3, 2, 7, 4), (2, 1, 3, 2, 5, 4), (2, 1, 3, 2, 5, 6), (7, 1)),
    "fewer-key-dimensions": ((3, 2, 7, 4), (2, 5, 4), (5, 6), (7, 5)),
    "broadcast-batch": ((1, 2, 7, 4), (3, 2, 5, 4), (1, 2, 5, 6), (3, 1, 7, 5)),
    "broadcast-heads": ((3, 1, 7, 4), (3, 2, 5, 4), (3, 1, 5, 6), (2, 7, 5)),
    "no-keys": ((3, 2, 7, 4), (3, 2, 0, 4), (3, 2, 0, 6), (7, 0)),
    "no-queries": ((3, 2, 0, 4), (3, 2, 5, 4), (3, 2, 5, 6), (0, 5)),
    "no-batch": ((0, 2, 7, 4), (0, 2, 5, 4), (0, 2, 5, 6), (7, 5)),
}


def assert_same(tensors: Qkv, bias: Tensor | None = None, **options: Any) -> None:
    """Asserts the values, shapes, dtypes and gradients of torch."""
    if bias is not None:
        options["attn_mask"] = bias
    ours = tk.scaled_dot_product_attention(*tensors, **options)
    torchs = functional.scaled_dot_product_attention(*tensors, **options)
    assert_same_function(ours, torchs)
    cotangent = torch.randn_like(torchs)
    wanted = [*tensors] if bias is None else [*tensors, bias]
    got = torch.autograd.grad(ours, wanted, cotangent)
    expected = torch.autograd.grad(torchs, wanted, cotangent, materialize_grads=True)
    assert_same_function(got, expected)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: tuple[Shape, Shape, Shape, Shape], mask: str) -> None:
    tensors = (leaf(*shapes[0]), leaf(*shapes[1]), leaf(*shapes[2]))
    if mask == "bool":
        assert_same(tensors, attn_mask=torch.rand(shapes[3]) < 0.6)
    elif mask == "float":
        assert_same(tensors, bias=leaf(*shapes[3]))
    else:
        assert_same(tensors, is_causal=mask == "causal")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = leaves(dtype=dtype)
    assert_same(tensors, is_causal=True)
    assert_same(tensors, bias=leaf(7, 5, dtype=dtype))


def test_float32_mask_with_half_inputs() -> None:
    assert_same(leaves(dtype=torch.bfloat16), attn_mask=torch.randn(7, 5))


@each("scale", [None, 0.3, 1, 0.0, -1.0])
def test_scale(scale: float | None) -> None:
    assert_same(leaves(), scale=scale)


@pytest.mark.parametrize("lead", [(3,), (), (2, 3)], ids=str)
def test_gqa(lead: Shape) -> None:
    tensors = (leaf(*lead, 6, 7, 4), leaf(*lead, 2, 5, 4), leaf(*lead, 2, 5, 6))
    assert_same(tensors, enable_gqa=True)
    assert_same(tensors, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("as_float", [False, True])
def test_hidden_rows_are_zero(as_float: bool) -> None:
    visible = torch.rand(7, 5) < 0.5
    visible[3] = False
    mask = torch.zeros(7, 5).masked_fill(~visible, float("-inf")) if as_float else visible
    tensors = leaves()
    assert_same(tensors, attn_mask=mask)
    assert not tk.scaled_dot_product_attention(*tensors, attn_mask=mask)[:, :, 3].any()


def test_dropout_applies_in_every_mode() -> None:
    q = k = torch.zeros(1, 1, 64, 4)
    weights = tk.scaled_dot_product_attention(q, k, torch.eye(64)[None, None], dropout_p=0.5)
    assert set(weights.flatten().tolist()) == {0.0, 2 / 64}
    assert not tk.scaled_dot_product_attention(q, k, k, dropout_p=1.0).any()


Q, K, V = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 6)
META, SPARSE = Q.to("meta"), Q.to_sparse()
MASK = torch.ones(3, 5, dtype=torch.bool)
NESTED = torch.nested.nested_tensor([Q[0], Q[0, :, :2]])
INVALID: dict[str, tuple[Qkv, dict[str, Any]]] = {
    "heads-without-gqa": ((torch.randn(2, 4, 3, 4), K, V), {}),
    "heads-no-multiple": ((torch.randn(2, 3, 3, 4), K, V), {"enable_gqa": True}),
    "no-dimension": ((torch.tensor(1.0), K, V), {}),
    "one-dimension": ((Q, K[0, 0, 0], V), {}),
    "widths": ((Q, K[..., :3], V), {}),
    "lengths": ((Q, K, V[:, :, :4]), {}),
    "batches": ((torch.randn(3, 2, 3, 4), K, V), {}),
    "key-dtype": ((Q, K.double(), V), {}),
    "value-dtype": ((Q, K, V.half()), {}),
    "integers": ((Q.long(), K.long(), V.long()), {}),
    "complex": ((Q.to(torch.cfloat), K.to(torch.cfloat), V.to(torch.cfloat)), {}),
    "device": ((META, K, V), {}),
    "list": (([1.0], K, V), {}),  # type: ignore[dict-item]
    "list-with-mask": (([1.0], K, V), {"attn_mask": MASK}),  # type: ignore[dict-item]
    "sparse": ((SPARSE, K.to_sparse(), V.to_sparse()), {}),
    "sparse-query": ((SPARSE, K, V), {}),
    "nested-query": ((NESTED, K, V), {}),
    "mask-list": ((Q, K, V), {"attn_mask": [True]}),
    "mask-device": ((Q, K, V), {"attn_mask": torch.ones(3, 5, device="meta").bool()}),
    "mask-sparse": ((Q, K, V), {"attn_mask": torch.ones(3, 5).bool().to_sparse()}),
    "mask-nested": ((Q, K, V), {"attn_mask": torch.nested.nested_tensor([torch.ones(3, 5)])}),
    "mask-double": ((Q, K, V), {"attn_mask": torch.randn(3, 5).double()}),
    "mask-half": ((Q, K, V), {"attn_mask": torch.randn(3, 5).half()}),
    "mask-complex": ((Q, K, V), {"attn_mask": torch.randn(3, 5, dtype=torch.cfloat)}),
    "mask-integer": ((Q, K, V), {"attn_mask": torch.ones(3, 5).long()}),
    "mask-shape": ((Q, K, V), {"attn_mask": torch.ones(5, 3).bool()}),
    "mask-shape-float": ((Q, K, V), {"attn_mask": torch.ones(5, 3)}),
    "mask-batch": ((Q[:1], K[:1], V[:1]), {"attn_mask": torch.ones(3, 1, 3, 5).bool()}),
    "mask-5d": ((Q, K, V), {"attn_mask": torch.ones(2, 1, 1, 3, 5)}),
    "mask-3d-of-2d": ((Q[0, 0], K[0, 0], V[0, 0]), {"attn_mask": torch.ones(2, 3, 5)}),
    "mask-of-5d": ((Q[None], K[None], V[None]), {"attn_mask": torch.ones(2, 1, 2, 3, 5)}),
    "mask-shape-and-causal": ((Q, K, V), {"attn_mask": torch.ones(5, 3), "is_causal": True}),
    "dropout": ((Q, K, V), {"dropout_p": 1.5}),
    "dropout-str": ((Q, K, V), {"dropout_p": "0.5"}),
    "scale-str": ((Q, K, V), {"scale": "0.5"}),
    "causal-tensor": ((Q, K, V), {"is_causal": torch.ones(2)}),
    "causal-int": ((Q, K, V), {"is_causal": 1}),
    "gqa-str": ((Q, K, V), {"enable_gqa": "yes"}),
}


@each(("tensors", "options"), INVALID.values(), ids=INVALID)
def test_invalid_calls_raise_what_torch_raises(tensors: Qkv, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, RuntimeError)) as torchs:
        functional.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises((ValueError, TypeError)) as ours:
        tk.scaled_dot_product_attention(*tensors, **options)
    assert isinstance(ours.value, torchs.type)
    assert not re.search(r"\b(q|k|v|bias|mask)\b", str(ours.value))
    with tk.enabled(), pytest.raises(torchs.type):
        functional.scaled_dot_product_attention(*tensors, **options)


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 7, 5)], ids=str)
def test_mask_and_causal_both_apply(shape: Shape, as_float: bool) -> None:
    """torch's flash kernel applies both too; its math kernel, and torch 2.15, raise an error."""
    tensors = leaf(2, 2, 7, 4), leaf(2, 2, 5, 4), leaf(2, 2, 5, 4)
    causal = torch.ones(7, 5).tril().bool()
    mask = torch.randn(shape) if as_float else torch.rand(shape) < 0.7
    both = mask.masked_fill(~causal, float("-inf")) if as_float else mask & causal
    ours = tk.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    expected = functional.scaled_dot_product_attention(*tensors, attn_mask=both)
    assert_same_function(ours, expected)
    cotangent = torch.randn_like(expected)
    assert_same_function(
        torch.autograd.grad(ours, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
    )
    with tk.enabled():
        got = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
    assert_same_function(got, expected)


def test_mismatched_heads_suggest_enable_gqa() -> None:
    with pytest.raises(ValueError, match="query has 4 heads and key 2; enable_gqa=True allows"):
        tk.scaled_dot_product_attention(torch.randn(2, 4, 3, 4), K, V)


LENGTHS_Q, LENGTHS_K = (3, 67, 1), (5, 70, 4)


def jagged(lengths: tuple[int, ...]) -> Tensor:
    """(B, lengths, H, D), as a linear layer gives it."""
    rows = [torch.randn(n, 4, 12) for n in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = functional.scaled_dot_product_attention(q, k, v, **options)
    return o.transpose(1, 2)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    outputs = []
    for rows in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        q_, k_, v_ = (x.transpose(0, 1) for x in rows)
        o = functional.scaled_dot_product_attention(q_, k_, v_, **options)
        outputs.append(o.transpose(0, 1))
    return outputs


@pytest.fixture(params=["same", "keys-of-another-length"])
def qkv(request: pytest.FixtureRequest) -> list[Tensor]:
    q = jagged(LENGTHS_Q)
    k = torch.randn_like(q) if request.param == "same" else jagged(LENGTHS_K)
    return [x.requires_grad_() for x in (q, k, torch.randn_like(k))]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_jagged_training(qkv: list[Tensor], options: dict[str, Any]) -> None:
    expected = by_sequence(*qkv, **options)
    cotangents = [torch.randn_like(o) for o in expected]
    wanted = torch.autograd.grad(expected, qkv, cotangents)

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        o = attend(*qkv, **options)
        return o, torch.autograd.grad(o.values(), qkv, torch.cat(cotangents))

    with tk.enabled():
        ran = operators_run_by(step)
        o, grads = step()
    assert (ran[FORWARD], ran[BACKWARD]) == (1, 1)
    assert o.layout is torch.jagged
    assert_same_function(list(o.unbind()), expected)
    for got, want in zip(grads, wanted, strict=True):
        assert_same_function(got.values(), want.values())


def test_the_jagged_result_has_the_lengths_of_the_queries(qkv: list[Tensor]) -> None:
    """Torch adds and concatenates jagged tensors only if they share their offsets."""
    with tk.enabled():
        o = attend(*qkv)
    assert o.shape == qkv[0].shape
    torch.testing.assert_close((o + qkv[0]).values(), o.values() + qkv[0].values())


def test_jagged_grouped_heads() -> None:
    q = jagged(LENGTHS_Q)
    k = q[..., :2, :]
    with tk.enabled():
        got = attend(q, k, k, enable_gqa=True)
        with pytest.raises(RuntimeError):
            attend(q, k, k)
    assert_same_function(list(got.unbind()), by_sequence(q, k, k, enable_gqa=True))


def test_jagged_dropout_is_that_of_attention_varlen(qkv: list[Tensor]) -> None:
    q, k, v = qkv
    with tk.enabled():
        torch.manual_seed(3)
        o = attend(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    offsets = (x.offsets() for x in (q, k))  # type: ignore[attr-defined]
    expected = tk.attention_varlen(q.values(), k.values(), v.values(), *offsets, dropout_p=0.3)
    assert torch.equal(o.values(), expected)


def test_jagged_autocast(qkv: list[Tensor]) -> None:
    with tk.enabled(), torch.autocast("cpu", torch.bfloat16):
        assert attend(*qkv).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
@not_in_2_11
def test_compiled_jagged_training(compiler: str) -> None:
    q = jagged(LENGTHS_Q).requires_grad_()
    compiled = torch.compile(attend, backend=compiler, fullgraph=True)
    with tk.enabled():
        expected, o = attend(q, q, q, is_causal=True), compiled(q, q, q, is_causal=True)
        cotangent = torch.randn_like(o.values())
        (wanted,) = torch.autograd.grad(expected.values(), q, cotangent)
        (got,) = torch.autograd.grad(o.values(), q, cotangent)
    assert_same_function(o.values(), expected.values())
    assert_same_function(got.values(), wanted.values())


@torch.no_grad()
def test_torch_attends_to_jagged_tensors_where_these_kernels_do_not() -> None:
    q = jagged(LENGTHS_Q)
    gaps = torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 4, 12), torch.tensor([0, 4, 9]), torch.tensor([2, 5])
    )
    expected = attend(q, q, q)
    with tk.enabled():
        with sdpa_kernel(SDPBackend.MATH):
            ran = operators_run_by(lambda: attend(q, q, q))
        assert FORWARD not in ran
        with pytest.raises(RuntimeError):
            attend(gaps, gaps, gaps)
        with pytest.warns(UserWarning, match="falling back to torch's own attention: scale must"):
            attend(q, q, q, scale=float("inf"))
        with pytest.raises(ValueError, match="to be nested tensors"):
            functional.scaled_dot_product_attention(q.transpose(1, 2), q.values(), q.values())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert FORWARD in operators_run_by(lambda: attend(q, q, q))
    assert FORWARD not in operators_run_by(lambda: attend(q, q, q))
    torch.testing.assert_close(attend(q, q, q).values(), expected.values())
