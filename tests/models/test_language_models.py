"""Sparse and linear attention, Sparse Transformer and Linear Transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.models.zoo import SPARSE, entry_of, randn, result_and_gradients, saved_sizes, tokens
from tests.support.tiers import each
from transformer_kernels import LinearState, Mask, alibi_slopes
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.nn import (
    LinearImplementation,
    LinearSelfAttention,
    SparsePattern,
    linear_attention,
    sparse_attention,
)

# Sparse attention

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
    q, k, v = (
        randn(2, T, HEADS, size, seed=T + n).to(dtype).transpose(1, 2).requires_grad_()
        for n, size in enumerate((D, D, D - 1))
    )
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Tensor:
    """The same in plain torch."""
    visible = pattern.visible(HEADS, q.shape[2])
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~visible, float("-inf"))
    some = visible.any(dim=-1, keepdim=True)
    weights: Tensor = scores.masked_fill(~some, 0).softmax(dim=-1).masked_fill(~some, 0)
    return weights @ v


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
    assert torch.equal(pattern.visible(HEADS, 17, start=6), visible[:, 6:])


@every_pattern
@pytest.mark.parametrize("T", [0, 1, 4, 5, 7, 18, 131])
def test_sparse_attention_equals_that_with_a_dense_mask(pattern: SparsePattern, T: int) -> None:
    inputs = qkv(T)
    found = result_and_gradients(sparse_attention(*inputs, pattern), *inputs)
    expected = result_and_gradients(dense(*inputs, pattern), *inputs)
    assert_same_function(found, expected)
    with torch.no_grad():
        assert_same_function(sparse_attention(*inputs, pattern), expected[0])


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
    inputs = qkv(T)
    sizes = saved_sizes(lambda: sparse_attention(*inputs, pattern))
    assert 0 < max(sizes) <= 1.1 * inputs[0].numel() < T * T


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


@each(
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


# Sparse Transformer


@each(
    ("options", "message"),
    [
        ({"subblocks": 3}, "must be a multiple of subblocks = 3, got 4"),
        ({"combination": "split", "heads": 1, "subblocks": 1}, "split needs at least 2 heads"),
    ],
)
def test_unsuitable_patterns_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPARSE, **options)


# Linear attention

WIDTH, LINEAR_HEADS = 12, 3
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True},
    {"decay": True},
    {"causal": False},
    {"feature_map": "relu"},
    {"feature_map": torch.exp, "decay": True},
)

every_implementation = pytest.mark.parametrize("implementation", get_args(LinearImplementation))
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "plain")


def layer(implementation: LinearImplementation = "fused", **options: Any) -> LinearSelfAttention:
    """A layer in float64 with large random weights."""
    attention = LinearSelfAttention(
        WIDTH, LINEAR_HEADS, attn_implementation=implementation, **options
    ).double()
    with torch.no_grad():
        for n, parameter in enumerate(attention.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=n))
    return attention


def x(T: int) -> Tensor:
    return randn(2, T, WIDTH, seed=T)


def by_definition(attention: LinearSelfAttention, x: Tensor, options: dict[str, Any]) -> Tensor:
    """The layer from its weights, with a matrix of attention weights."""
    phi = {"relu": torch.relu, torch.exp: torch.exp}.get(
        options.get("feature_map", "elu"), lambda x: torch.where(x > 0, x + 1, x.exp())
    )
    heads = []
    for h in range(LINEAR_HEADS):
        rows = slice(h * WIDTH // LINEAR_HEADS, (h + 1) * WIDTH // LINEAR_HEADS)
        q, k, v = (
            x @ f.weight[rows].T + (0.0 if f.bias is None else f.bias[rows])
            for f in (attention.queries, attention.keys, attention.values)
        )
        i = torch.arange(x.shape[1])
        weights = phi(q) @ phi(k).mT
        if options.get("decay"):
            weights = weights * torch.exp(
                -alibi_slopes(LINEAR_HEADS)[h].double() * (i[:, None] - i)
            )
        if options.get("causal", True):
            weights = weights.tril()
        heads.append(weights @ v / (weights.sum(dim=-1, keepdim=True) + 1e-6))
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.T + attention.out_proj.bias


@every_implementation
@every_option
@pytest.mark.parametrize("T", [1, 11, 130])
def test_linear_attention_equals_its_definition(
    implementation: LinearImplementation, options: dict[str, Any], T: int
) -> None:
    """With inputs whose sums of weights are 0 or above 0.07: small ones would amplify rounding."""
    attention, inputs = layer(implementation, **options), x(T).requires_grad_()
    y, expected = (
        result_and_gradients(z, inputs, *attention.parameters())
        for z in (attention(inputs), by_definition(attention, inputs, options))
    )
    assert_same_function(y, expected)


def test_eager_is_plain_linear_attention_and_fused_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, *, backend: str, **_: Any) -> Tensor:
        found.append(backend)
        return v

    def decode(q: Tensor, k: Tensor, v: Tensor, state: LinearState, **options: Any) -> Tensor:
        return dense(q, k, v, **options)

    monkeypatch.setattr(linear_attention, "linear_attention", dense)
    monkeypatch.setattr(linear_attention, "linear_attention_decode", decode)
    for implementation in ("eager", "fused"):
        attention = layer(implementation)
        attention(x(3))
        attention(x(3), state=attention.new_state(2))
    assert found == ["reference", "reference", "auto", "auto"]


@every_implementation
@pytest.mark.parametrize("causal", [True, False])
def test_padding_reaches_no_result_and_no_gradient(
    implementation: LinearImplementation, causal: bool
) -> None:
    attention, inputs = layer(implementation, causal=causal), x(9)
    alone = attention(inputs[1:, :5])
    padded = inputs.clone()
    padded[1, 5:] = torch.nan
    padded.requires_grad_()
    y = attention(padded, mask=Mask.padding(torch.tensor([9, 5])))
    assert_same_function(y[1:, :5], alone)
    assert_same_function(y[0], attention(inputs)[0])
    (gradient,) = torch.autograd.grad(y[1, :5].sum(), padded)
    assert (gradient[1, :5] != 0).any()
    assert not gradient[0].any()


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_state_is_at_least_float32(dtype: torch.dtype) -> None:
    """300 tokens in bfloat16: a state in bfloat16 would stop to grow at 256."""
    attention = layer().to(dtype)
    state = attention.new_state(2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {part.dtype for part in state} == {wide}
    with torch.no_grad():
        for _ in range(300):
            attention.keys.weight.zero_()
            attention(x(1).to(dtype), state=state)
    torch.testing.assert_close(state.z, torch.full_like(state.z, 300.0))


def test_with_a_state_autograd_does_not_apply_to_the_attention() -> None:
    attention = layer()
    attention(x(3), state=attention.new_state(2)).sum().backward()
    assert attention.out_proj.weight.grad is not None
    assert attention.keys.weight.grad is None


@every_implementation
def test_layer_runs_under_autocast(implementation: LinearImplementation) -> None:
    attention = layer(implementation, decay=True).float()
    inputs = x(20).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(inputs)
        state = attention.new_state(2)
        again = attention(inputs, state=state)
    assert y.dtype == torch.bfloat16
    assert_same_function(y, attention(inputs), dtype=torch.bfloat16)
    assert_same_function(again, y)
    y.sum().backward()
    assert attention.queries.weight.grad is not None


@each(
    ("options", "message"),
    [
        ({"attn_implementation": "sdpa"}, "must be one of 'eager', 'fused', got 'sdpa'"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"decay": True, "causal": False}, "decay needs causal=True"),
    ],
)
def test_invalid_options_of_linear_layers_raise_value_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LinearSelfAttention(WIDTH, **{"heads": LINEAR_HEADS, **options})


def test_a_state_needs_a_causal_layer_without_a_mask() -> None:
    attention = layer()
    state, mask = attention.new_state(2), Mask.padding(torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="a state needs a causal layer and no mask, got causal=T"):
        attention(x(3), mask=mask, state=state)
    with pytest.raises(ValueError, match="got causal=False and mask=None"):
        layer(causal=False)(x(3), state=state)
    with pytest.raises(ValueError, match=r"state.S must be \(2, 3, 4, 4\)"):
        attention(x(3), state=attention.new_state(1))


# Linear Transformer

LINEAR_MODELS = pytest.mark.parametrize(
    "name", ["linear-learned", "linear-columns", "linear-decay"]
)


@LINEAR_MODELS
def test_size_of_the_state_is_constant_and_a_call_leaves_it_as_it_is(name: str) -> None:
    transformer = entry_of(name).build()
    state, length = transformer.new_state(3), 0
    for count in (1, 40, 7):
        before = [part.clone() for part in state]
        logits, after = transformer(tokens(count), state)
        assert all(map(torch.equal, state, before))
        assert torch.equal(transformer(tokens(count), state)[0], logits)
        state, length = after, length + count
        shapes = [tuple(part.shape) for part in state]
        assert shapes == [(3,), (3, 2, 8, 8), (3, 2, 8), (3, 2, 8, 8), (3, 2, 8)]
        assert all(part.untyped_storage().nbytes() == 8 * part.numel() for part in state)
        assert state[0].tolist() == [length] * 3
        assert [part.dtype for part in state] == [torch.int64, *[torch.float64] * 4]


@LINEAR_MODELS
def test_texts_of_different_lengths_continue_in_one_batch(name: str) -> None:
    transformer, text = entry_of(name).build(), tokens(20, batch=2)
    states = [
        transformer(text[b : b + 1, :n], transformer.new_state(1))[1] for b, n in ((0, 9), (1, 2))
    ]
    joined = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
    logits, _ = transformer(torch.stack([text[0, 9:14], text[1, 2:7]]), joined)
    whole = transformer(text)
    assert_same_function(logits, torch.stack([whole[0, 9:14], whole[1, 2:7]]))


@pytest.mark.parametrize(("columns", "rows"), [(4, 3), (None, 1)])
def test_sizes_of_the_layers_follow_the_config(columns: int | None, rows: int) -> None:
    for name in ("linear-learned", "reformer"):
        model = entry_of(name).build(context=10, columns=columns, hidden=20)
        assert model.positions.rows.shape == (rows, 16)
        assert model.positions.columns.shape == (columns or 10, 16)
        hidden = model.get_parameter("blocks.0.feed_forward.up_proj.weight")
        assert hidden.shape == (20, 16)


def test_a_decay_makes_positions_relative() -> None:
    """The same tokens after others that are forgotten: slopes of 1/16 and 1/256 need some."""
    transformer = entry_of("linear-decay").build()
    assert transformer.positions is None
    text, others = tokens(5), torch.zeros(3, 8000, dtype=torch.int64)
    once = transformer(torch.cat([others, text], dim=1))[:, -5:]
    twice = transformer(torch.cat([others, text, others, text], dim=1))[:, -5:]
    assert_same_function(once, twice)
    near = transformer(torch.cat([text, text], dim=1))[:, -5:]
    assert not torch.isclose(once, near).all(dim=-1).any()


def test_other_states_raise_value_error() -> None:
    transformer = entry_of("linear-learned").build()
    state = transformer.new_state(3)
    for other in (transformer.new_state(1), state[:-1], (), (state[0][:1], *state[1:])):
        with pytest.raises(ValueError, match=r"state must have the shapes \[\(3,\), \(3, 2, 8, 8"):
            transformer(tokens(3), other)
