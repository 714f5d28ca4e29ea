"""`attend`, `MultiHeadAttention` and the key/value cache, by formulas and by torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.models.zoo import IMPLEMENTATIONS, randn
from tests.support.tiers import each
from transformer_kernels import Mask, relative_bias
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.nn import (
    AttnImplementation,
    HeadForm,
    KVCache,
    MultiHeadAttention,
    Scaling,
    attend,
    attention,
    basic_self_attention,
    divide_by_fourth_root,
)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, bias: Tensor | float = 0.0
) -> Tensor:
    s = (scale * q @ k.transpose(-2, -1) + bias).masked_fill(~visible, -math.inf)
    return s.softmax(dim=-1) @ v


PARTS = (4, 1, 1, 3, 1)
B, T, WIDTH, HEADS = 3, sum(PARTS), 12, 2


def x() -> Tensor:
    return randn(B, T, WIDTH, seed=1)


def cache(capacity: int = T + 2) -> KVCache:
    return KVCache(
        layers=1, batch=B, heads=HEADS, capacity=capacity, head_size=6, dtype=torch.float64
    )


MASKS = {
    "none": None,
    "causal": Mask.causal(),
    "causal bottom right": Mask.causal(align="bottom_right"),
    "window": Mask.window(2, 0),
    "causal and padding": Mask.causal() & Mask.padding(torch.tensor([5, 3])),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("added", ["nothing", "bias", *get_args(Align)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_every_implementation_matches_the_formula(
    mask: Mask | None, added: str, implementation: AttnImplementation
) -> None:
    """With nothing, a bias, or a relative bias of either alignment added to the scaled scores."""
    B, H, M, N, D = 2, 3, 5, 7, 11
    inputs = [randn(B, H, M, D, seed=1), randn(B, H, N, D, seed=2), randn(B, H, N, D, seed=3)]
    options: dict[str, Any] = {"mask": mask, "attn_implementation": implementation}
    bias: Tensor | float = 0.0
    if added == "bias":
        options["bias"] = bias = randn(H, M, N, seed=5).requires_grad_()
        inputs.append(bias)
    elif added != "nothing":
        inputs.append(table := randn(H, 6, seed=4).requires_grad_())
        options["relative"] = relative_bias(table, lowest=-2, align=added)  # type: ignore[arg-type]
        origin = N - M if added == "bottom_right" else 0
        distance = torch.arange(M)[:, None] + origin - torch.arange(N)
        bias = table[:, (distance + 2).clamp(0, 5)]
    if added != "nothing":
        options["scale"] = 0.3
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    visible = torch.ones(M, N, dtype=torch.bool)
    if mask is not None:
        visible = mask.materialize(B, H, M, N)

    expected = by_formula(q, k, v, visible, options.get("scale", 1 / math.sqrt(D)), bias)
    o = attend(q, k, v, **options)

    assert_same_function(o, expected)
    do = randn(B, H, M, D, seed=6)
    assert_same_function(
        torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do)
    )


def test_eager_is_plain_torch_and_fused_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []

    def record(q: Tensor, k: Tensor, v: Tensor, *_: Any, backend: str, **__: Any) -> Tensor:
        backends.append(backend)
        return v

    monkeypatch.setattr(attention, "attention_operator", record)
    monkeypatch.setattr(attention, "attention_decode", record)
    q = randn(B, HEADS, 1, 6)
    for implementation in ("eager", "fused"):
        attend(q, q, q, attn_implementation=implementation)
        kv_cache = cache()
        kv_cache.extend(1)
        kv_cache.layer(0).attend(q, q, q, scale=None, attn_implementation=implementation)
    assert backends == ["reference", "reference", "auto", "auto"]


def test_sdpa_materializes_no_mask_for_plain_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.append((options["attn_mask"] is not None, bool(options["is_causal"])))
        return v

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    x = randn(1, 1, 4, 4)
    lengths = torch.tensor([3])
    for mask in (None, Mask.causal(), Mask.causal() & Mask.padding(lengths), Mask.window(1, 0)):
        attend(x, x, x, mask=mask, attn_implementation="sdpa")
    assert seen == [(False, False), (False, True), (True, False), (True, False)]


def test_eager_and_fused_drop_the_same_weights() -> None:
    q, k, v = (randn(1, 2, 9, 8, seed=seed) for seed in (1, 2, 3))
    results: list[Tensor] = []
    for implementation in ("eager", "fused"):
        torch.manual_seed(5)
        results.append(attend(q, k, v, dropout_p=0.5, attn_implementation=implementation))
    assert_same_function(results[0], results[1])
    assert not torch.allclose(results[0], attend(q, k, v))


# Basic self-attention


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_basic_self_attention_has_no_scale(implementation: AttnImplementation) -> None:
    x = randn(2, 6, 5)
    weights = torch.bmm(x, x.transpose(1, 2)).softmax(dim=2)
    assert_same_function(
        basic_self_attention(x, attn_implementation=implementation), torch.bmm(weights, x)
    )


# Scaling


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scalings_of_scores_and_of_inputs_agree(implementation: AttnImplementation) -> None:
    x = randn(2, 6, 12)
    results: list[Tensor] = []
    for scaling in get_args(Scaling):
        torch.manual_seed(0)
        module = MultiHeadAttention(
            12, 3, scaling=scaling, attn_implementation=implementation
        ).double()
        results.append(module(x, mask=Mask.causal()))
    assert_same_function(results[0], results[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scaled_inputs_stay_finite_in_fp16_where_scores_overflow(
    implementation: AttnImplementation,
) -> None:
    q, k = ((40 + randn(1, 1, 5, 64, seed=seed)).half() for seed in (1, 2))
    v = randn(1, 1, 5, 64, seed=3).half()
    small_q, small_k = divide_by_fourth_root(q), divide_by_fourth_root(k)
    assert (q @ k.mT / 8).isinf().all()
    assert (small_q @ small_k.mT).isfinite().all()
    o = attend(small_q, small_k, v, scale=1.0, attn_implementation=implementation)
    # Outputs are averages of v, so they stay in its range however the large scores are rounded.
    assert v.min() <= o.min() <= o.max() <= v.max()


# Heads


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "width", "heads", "head_size"),
    [("narrow", 12, 3, 4), ("wide", 10, 3, 10), ("wide", 256, 2, 256)],
)
def test_heads_match_the_formula(
    form: HeadForm, width: int, heads: int, head_size: int, implementation: AttnImplementation
) -> None:
    """Scores are scaled by the head size, of which 256 is the largest of the kernels."""
    module = MultiHeadAttention(
        width, heads, form=form, attn_implementation=implementation
    ).double()
    inputs = randn(2, 5, width)
    q, k, v = (
        layer(inputs).unflatten(2, (heads, head_size)).transpose(1, 2)
        for layer in (module.queries, module.keys, module.values)
    )
    o = by_formula(q, k, v, torch.ones(5, 5, dtype=torch.bool), head_size**-0.5)
    results = [
        (y, torch.autograd.grad(y.square().sum(), list(module.parameters())))
        for y in (module(inputs), module.out_proj(o.transpose(1, 2).flatten(2)))
    ]
    assert_same_function(results[0], results[1])


def test_cross_attention_reads_keys_and_values_from_the_source() -> None:
    """The width of the source need not be a multiple of heads."""
    module = MultiHeadAttention(12, 3, source_width=7).double()
    target, source = randn(2, 4, 12), randn(2, 6, 7)
    y = module(target, source)
    assert y.shape == (2, 4, 12)
    padded = torch.cat([source, torch.full((2, 2, 7), math.nan, dtype=torch.float64)], dim=1)
    assert_same_function(module(target, padded, mask=Mask.padding(torch.tensor([6, 6]))), y)


def test_heads_are_views_of_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[tuple[int, ...]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        strides.extend(x.stride() for x in (q, k, v))
        return v

    monkeypatch.setattr(attention, "attention_operator", record)
    MultiHeadAttention(12, 3)(randn(2, 5, 12).float())
    assert strides == [(5 * 12, 4, 12, 1)] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fully_masked_row_gives_the_output_bias(
    implementation: AttnImplementation, dtype: torch.dtype
) -> None:
    module = MultiHeadAttention(8, 2, attn_implementation=implementation).to(dtype)
    x = randn(2, 3, 8).to(dtype).requires_grad_()
    y = module(x, mask=Mask.padding(torch.tensor([0, 3])))
    torch.testing.assert_close(y[0], module.out_proj.bias.expand(3, 8))
    (dx,) = torch.autograd.grad(y[0].sum(), x)
    assert (dx == 0).all()


def test_dropout_applies_in_training_only() -> None:
    module = MultiHeadAttention(8, 2, dropout=0.5).double()
    x = randn(1, 9, 8)
    assert not torch.allclose(module(x), module(x))
    module.eval()
    torch.testing.assert_close(module(x), module(x), rtol=0, atol=0)


# Key/value cache


@pytest.mark.parametrize("scaling", get_args(Scaling))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_attention_matches_one_call(
    implementation: AttnImplementation, scaling: Scaling
) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        WIDTH, HEADS, bias=True, scaling=scaling, attn_implementation=implementation
    ).double()
    kv_cache, start = cache(), 0
    parts = []
    for count in PARTS:
        assert kv_cache.extend(count) == start
        parts.append(layer(x()[:, start : start + count], cache=kv_cache.layer(0)))
        start += count
    assert kv_cache.length == T
    assert_same_function(torch.cat(parts, dim=1), layer(x(), mask=Mask.causal()))


def test_extending_beyond_the_capacity_raises_and_changes_nothing() -> None:
    kv_cache = cache(capacity=5)
    kv_cache.extend(4)
    with pytest.raises(
        ValueError,
        match=r"count must be at most 1, the free positions .* capacity 5 and length 4, got 2",
    ):
        kv_cache.extend(2)
    assert kv_cache.length == 4
    assert kv_cache.cache_seqlens.tolist() == [4] * B


# Errors


def mask_with_a_cache() -> Tensor:
    kv_cache = cache()
    kv_cache.extend(1)
    layer = MultiHeadAttention(WIDTH, HEADS).double()
    y: Tensor = layer(x()[:, :1], mask=Mask.causal(), cache=kv_cache.layer(0))
    return y


@each(
    ("call", "message"),
    [
        (
            lambda: attend(*[randn(1, 1, 2, 2)] * 3, attn_implementation="flash"),  # type: ignore[arg-type]
            "attn_implementation must be one of 'eager'.*got 'flash'",
        ),
        (lambda: basic_self_attention(randn(3, 4)), r"x must be \(batch, .* got shape \(3, 4\)"),
        (mask_with_a_cache, "mask must be None with a cache"),
    ],
)
def test_invalid_calls_raise_value_error(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@each(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"head_size": 0}, "head_size must be a whole number of at least 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number of at least 1, got 2.0"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"heads": 5, "source_width": 10}, "width must be a multiple of heads .* 12 and 5"),
        ({"form": "long"}, "form must be one of 'narrow', 'wide', got 'long'"),
        ({"scaling": "none"}, "scaling must be one of 'scores', 'inputs', got 'none'"),
        ({"attn_implementation": "fast"}, "must be one of 'eager', 'fused', 'sdpa', got 'fast'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_invalid_options_raise_value_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**{"width": 12, "heads": 3} | arguments)
