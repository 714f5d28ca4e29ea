"""Sparse attention: patterns by their definition, equality with a dense mask, NaN, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels import Mask, attention
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.nn import SparsePattern, sparse_attention

HEADS = 4
FIXED = SparsePattern(kind="fixed", stride=5, summaries=2, subblocks=2)
PATTERNS = (
    SparsePattern(kind="local", stride=5),
    SparsePattern(kind="strided", stride=5),
    SparsePattern(kind="strided", stride=5, combination="split"),
    SparsePattern(kind="strided", stride=1),
    FIXED,
    replace(FIXED, combination="split"),
    SparsePattern(kind="fixed", stride=5, summaries=1, subblocks=4),
    SparsePattern(kind="fixed", stride=5, summaries=3),
    SparsePattern(kind="fixed", stride=3, summaries=3),
    SparsePattern(kind="fixed", stride=1),
)


def name(pattern: SparsePattern) -> str:
    sizes = f"{pattern.stride}-{pattern.summaries}-{pattern.subblocks}"
    return f"{pattern.kind}-{sizes}-{pattern.combination}"


every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=name)


def qkv(T: int, dtype: torch.dtype = torch.float64, D: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Each (2, HEADS, T, D), as a view of a projection's output; v is narrower."""
    generator = torch.Generator().manual_seed(T)

    def projected(D: int) -> Tensor:
        x = torch.randn(2, T, HEADS, D, generator=generator, dtype=torch.float64).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    return projected(D), projected(D), projected(D - 1)


def dense(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Tensor:
    """The same in plain torch."""
    visible = pattern.visible(HEADS, q.shape[2])
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~visible, float("-inf"))
    some = visible.any(dim=-1, keepdim=True)
    weights: Tensor = scores.masked_fill(~some, 0).softmax(dim=-1).masked_fill(~some, 0)
    return weights @ v


def result_and_gradients(o: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))


@every_pattern
def test_visible_pairs_are_those_of_the_paper(pattern: SparsePattern) -> None:
    """Section 4.2: A(1) are the near keys, A(2) the far ones; the strided A(1) as in the code."""
    n, c = pattern.stride, pattern.summaries
    visible = pattern.visible(HEADS, 17)
    for h in range(HEADS):
        first = n - c * (pattern.subblocks - h % pattern.subblocks)
        for i in range(17):
            if pattern.kind == "fixed":
                near = {j for j in range(i + 1) if j // n == i // n}
                far = {j for j in range(i + 1) if j % n in range(first, first + c)}
            else:
                near = {j for j in range(i + 1) if i - j < n}
                far = {j for j in range(i + 1) if (i - j) % n == 0}
            if pattern.kind == "local":
                expected = near
            elif pattern.combination == "merged":
                expected = near | far
            else:
                expected = near if h < HEADS // 2 else far
            assert set(visible[h, i].nonzero().flatten().tolist()) == expected, (h, i)


def test_visible_pairs_of_the_last_queries() -> None:
    for pattern in PATTERNS:
        whole = pattern.visible(HEADS, 13)
        assert torch.equal(pattern.visible(HEADS, 13, start=6), whole[:, 6:])


@every_pattern
@pytest.mark.parametrize("T", [0, 1, 4, 5, 7, 18, 131])
def test_results_and_gradients_equal_those_of_a_dense_mask(pattern: SparsePattern, T: int) -> None:
    inputs = qkv(T)
    found = result_and_gradients(sparse_attention(*inputs, pattern), *inputs)
    expected = result_and_gradients(dense(*inputs, pattern), *inputs)
    assert_same_function(found, expected)


@pytest.mark.usefixtures("poisoned")
@every_pattern
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_kernels_equal_float64(pattern: SparsePattern, dtype: torch.dtype) -> None:
    """In half precision the results of the near and the far keys are rounded before they merge.

    Uninitialized memory holds NaN.
    """
    inputs = qkv(150, dtype, D=32)
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    found = result_and_gradients(sparse_attention(*inputs, pattern), *inputs)
    exact = result_and_gradients(dense(q, k, v, pattern), q, k, v)
    plain = result_and_gradients(dense(*inputs, pattern), *inputs)
    for name, *results in zip(("o", "dq", "dk", "dv"), found, exact, plain, strict=True):
        assert results[0].dtype == dtype
        assert_within_rule(name, *results)


@every_pattern
@pytest.mark.parametrize("nan_key", [0, 3, 9, 10, 14])
def test_only_queries_that_see_a_nan_key_become_nan(pattern: SparsePattern, nan_key: int) -> None:
    q, k, v = (x.detach() for x in qkv(15))
    clean = sparse_attention(q, k, v, pattern)
    k[:, :, nan_key] = float("nan")
    o = sparse_attention(q, k, v, pattern)
    sees = pattern.visible(HEADS, 15)[..., nan_key].expand(2, -1, -1)
    assert o[sees].isnan().all()
    assert_same_function(o[~sees], clean[~sees])


@every_pattern
def test_memory_is_linear_in_the_length(pattern: SparsePattern) -> None:
    """No tensor that autograd saves is larger than q, except for padding."""
    T = 400
    sizes: list[int] = []

    def saved(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    inputs = qkv(T)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
        sparse_attention(*inputs, pattern)
    assert 0 < max(sizes) <= 1.1 * inputs[0].numel() < T * T


@every_pattern
def test_inference_equals_the_operator_with_a_dense_mask(pattern: SparsePattern) -> None:
    q, k, v = (x.detach() for x in qkv(33))
    with torch.no_grad():
        o = sparse_attention(q, k, v, pattern)
    expected = attention(q, k, v, mask=Mask.dense(pattern.visible(HEADS, 33)))
    assert_same_function(o, expected)


@each(
    ("options", "message"),
    [
        ({"kind": "dense"}, "kind must be one of 'local', 'strided', 'fixed', got 'dense'"),
        ({"stride": 0}, "stride must be a whole number of at least 1, got 0"),
        ({"summaries": -1}, "summaries must be a whole number of at least 1, got -1"),
        ({"subblocks": 1.0}, "subblocks must be a whole number of at least 1, got 1.0"),
        ({"combination": "sum"}, "combination must be one of 'merged', 'split', got 'sum'"),
        ({"subblocks": 3}, r"summaries \* subblocks must be at most stride = 5, got 2 \* 3"),
    ],
)
def test_invalid_patterns_raise_value_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FIXED, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "heads", "message"),
    [
        (replace(FIXED, combination="split"), 1, "split needs at least 2 heads, got 1"),
        (FIXED, 3, "heads with far keys must be a multiple of subblocks = 2, got 3"),
        (replace(FIXED, combination="split"), 6, "multiple of subblocks = 2, got 3"),
    ],
)
def test_unsuitable_numbers_of_heads_raise_value_error(
    pattern: SparsePattern, heads: int, message: str
) -> None:
    x = torch.zeros(1, heads, 4, 8)
    with pytest.raises(ValueError, match=message):
        sparse_attention(x, x, x, pattern)
    with pytest.raises(ValueError, match=message):
        pattern.visible(heads, 4)


def test_other_shapes_raise_value_error() -> None:
    q, k, v = qkv(7)
    for inputs in ((q[:, :, :6], k, v), (q, k[:, :2], v), (q, k, v[:1]), (q[0], k[0], v[0])):
        with pytest.raises(
            ValueError, match=r"must be \(B, H, T, D\) of one B, H and T, got shapes"
        ):
            sparse_attention(*inputs, FIXED)
