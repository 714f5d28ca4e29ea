"""`attend`, `MultiHeadAttention` and the key/value cache, by formulas and by torch."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

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

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, bias: Tensor | float = 0.0
) -> Tensor:
    s = (scale * q @ k.transpose(-2, -1) + bias).masked_fill(~visible, -math.inf)
    return s.softmax(dim=-1) @ v


PARTS = (4, 1, 1, 3, 1)
B, T, WIDTH, HEADS = 3, sum(PARTS), 12, 2


def x() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def cache(layers: int = 1, capacity: int = T + 2, *, head_size: int = 6) -> KVCache:
    return KVCache(
        layers=layers,
        batch=B,
        heads=HEADS,
        capacity=capacity,
        head_size=head_size,
        dtype=torch.float64,
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


def test_unknown_attn_implementation_raises_value_error() -> None:
    x = randn(1, 1, 2, 2)
    with pytest.raises(
        ValueError, match=r"attn_implementation must be one of 'eager'.*got 'flash'"
    ):
        attend(x, x, x, attn_implementation="flash")  # type: ignore[arg-type]


# Basic self-attention


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_basic_self_attention_has_no_scale(implementation: AttnImplementation) -> None:
    x = randn(2, 6, 5)
    weights = torch.bmm(x, x.transpose(1, 2)).softmax(dim=2)
    assert_same_function(
        basic_self_attention(x, attn_implementation=implementation), torch.bmm(weights, x)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_basic_self_attention_is_permutation_equivariant(
    implementation: AttnImplementation,
) -> None:
    x = randn(2, 7, 5)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    assert_same_function(
        basic_self_attention(x[:, order], attn_implementation=implementation),
        basic_self_attention(x, attn_implementation=implementation)[:, order],
    )


def test_basic_self_attention_rejects_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"x must be \(batch, length, width\), got shape \(3, 4\)"):
        basic_self_attention(randn(3, 4))


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
    D = 64
    q = (40 + randn(1, 1, 5, D, seed=1)).half()
    k = (40 + randn(1, 1, 5, D, seed=2)).half()
    v = randn(1, 1, 5, D, seed=3).half()
    scores_first = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D)
    inputs_first = torch.matmul(
        divide_by_fourth_root(q), divide_by_fourth_root(k).transpose(-2, -1)
    )
    assert scores_first.isinf().all()
    assert inputs_first.isfinite().all()

    o = attend(
        divide_by_fourth_root(q),
        divide_by_fourth_root(k),
        v,
        scale=1.0,
        attn_implementation=implementation,
    )
    assert o.isfinite().all()
    # Outputs are averages of v, so they stay in its range however the large scores are rounded.
    assert o.min() >= v.min()
    assert o.max() <= v.max()


# Heads


def weights_of(module: MultiHeadAttention) -> list[Tensor]:
    return [module.queries.weight, module.keys.weight, module.values.weight]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_narrow_heads_match_torch(implementation: AttnImplementation) -> None:
    width, heads = 24, 4
    ours = MultiHeadAttention(width, heads, attn_implementation=implementation).double()
    torchs = nn.MultiheadAttention(width, heads, bias=True, batch_first=True).double()
    with torch.no_grad():
        assert torchs.in_proj_weight is not None
        torchs.in_proj_weight.copy_(torch.cat(weights_of(ours)))
        torchs.in_proj_bias.zero_()
        torchs.out_proj.weight.copy_(ours.out_proj.weight)
        torchs.out_proj.bias.copy_(ours.out_proj.bias)
    x = randn(2, 7, width)
    expected, _ = torchs(x, x, x, need_weights=False)
    assert_same_function(ours(x), expected)


@pytest.mark.parametrize("form", get_args(HeadForm))
def test_scores_are_scaled_by_the_head_size(form: HeadForm) -> None:
    width, heads, T = 12, 3, 5
    module = MultiHeadAttention(width, heads, form=form).double()
    size = {"narrow": width // heads, "wide": width}[form]
    x = randn(2, T, width)
    visible = torch.ones(T, T, dtype=torch.bool)
    outputs = []
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        q, k, v = (x @ weight[rows].T for weight in weights_of(module))
        outputs.append(by_formula(q, k, v, visible, size**-0.5))
    assert_same_function(module(x), module.out_proj(torch.cat(outputs, dim=-1)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wide_heads_of_256_train(implementation: AttnImplementation) -> None:
    results = []
    for name in ("eager", implementation):
        torch.manual_seed(0)
        module = MultiHeadAttention(256, 2, form="wide", attn_implementation=name).double()
        loss = module(randn(1, 3, 256), mask=Mask.causal()).square().sum()
        results.append(torch.autograd.grad(loss, list(module.parameters())))
    assert module.head_size == 256
    assert_same_function(results[0], results[1])


def test_cross_attention_reads_keys_and_values_from_the_source() -> None:
    module = MultiHeadAttention(8, 2, source_width=5).double()
    x, source = randn(2, 3, 8), randn(2, 6, 5)
    y = module(x, source)
    assert y.shape == (2, 3, 8)
    padded = torch.cat([source, torch.full((2, 2, 5), math.nan, dtype=torch.float64)], dim=1)
    assert_same_function(module(x, padded, mask=Mask.padding(torch.tensor([6, 6]))), y)


def test_only_the_width_of_narrow_heads_must_be_a_multiple_of_heads() -> None:
    """`source_width` and the width of wide heads need not be a multiple of heads."""
    module = MultiHeadAttention(12, 3, source_width=7).double()
    assert module(randn(2, 4, 12), randn(2, 6, 7)).shape == (2, 4, 12)
    assert MultiHeadAttention(10, 3, form="wide").double()(randn(2, 4, 10)).shape == (2, 4, 10)
    with pytest.raises(ValueError, match=r"width must be a multiple of heads.*got 10 and 3"):
        MultiHeadAttention(10, 3, source_width=12)


def test_heads_are_views_of_the_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: list[tuple[int, ...]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        strides.extend(x.stride() for x in (q, k, v))
        return v

    monkeypatch.setattr(attention, "attention_operator", record)
    MultiHeadAttention(12, 3)(randn(2, 5, 12).float())
    assert strides == [(5 * 12, 4, 12, 1)] * 3


@each(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number of at least 1, got 2.0"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"form": "long"}, "form must be one of 'narrow', 'wide', got 'long'"),
        ({"scaling": "none"}, "scaling must be one of 'scores', 'inputs', got 'none'"),
        (
            {"attn_implementation": "fast"},
            "attn_implementation must be one of 'eager', 'fused', 'sdpa', got 'fast'",
        ),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_invalid_options_raise_value_error(arguments: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"width": 12, "heads": 3}
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**options | arguments)  # type: ignore[arg-type]


# Causal masking


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_a_query_sum_to_one(implementation: AttnImplementation) -> None:
    q, k = randn(1, 2, 5, 4, seed=1), randn(1, 2, 5, 4, seed=2)
    ones = torch.ones(1, 2, 5, 3, dtype=torch.float64)
    assert_same_function(
        attend(q, k, ones, mask=Mask.causal(), attn_implementation=implementation), ones
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_scale_does_not_depend_on_the_number_of_tokens(
    implementation: AttnImplementation,
) -> None:
    q, k, v = (randn(1, 1, 3, 4, seed=seed) for seed in (1, 2, 3))
    more = [torch.cat([x, randn(1, 1, 5, 4, seed=9)], dim=2) for x in (q, k, v)]
    assert_same_function(
        attend(*more, mask=Mask.causal(), attn_implementation=implementation)[:, :, :3],
        attend(q, k, v, mask=Mask.causal(), attn_implementation=implementation),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_first_query_sees_only_itself(implementation: AttnImplementation) -> None:
    q, k, v = (randn(1, 1, 4, 3, seed=seed) for seed in (1, 2, 3))
    o = attend(q, k, v, mask=Mask.causal(), attn_implementation=implementation)
    assert_same_function(o[:, :, 0], v[:, :, 0])


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


def test_module_does_not_store_the_attention_matrix() -> None:
    module = MultiHeadAttention(8, 2)
    before = set(vars(module))
    module(randn(1, 5, 8).float())
    assert set(vars(module)) == before
    assert not [name for name, value in vars(module).items() if isinstance(value, Tensor)]


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_incremental_attention_has_the_bias_of_absolute_distances(
    implementation: AttnImplementation,
) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, HEADS, T, 6, generator=generator).double() for _ in range(3))
    table = torch.randn(HEADS, 5, generator=generator).double()
    relative = relative_bias(table, lowest=1, align="bottom_right")
    kv_cache, start = cache(), 0
    parts = []
    for count in PARTS:
        kv_cache.extend(count)
        new = slice(start, start + count)
        o = kv_cache.layer(0).attend(
            q[:, :, new], k[:, :, new], v[:, :, new],
            scale=1.0, relative=relative, attn_implementation=implementation,
        )  # fmt: skip
        parts.append(o)
        start += count
    whole = attend(q, k, v, mask=Mask.causal(), relative=relative, scale=1.0)
    assert_same_function(torch.cat(parts, dim=2), whole)
    assert not torch.allclose(whole, attend(q, k, v, mask=Mask.causal(), scale=1.0))


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


def test_mask_with_a_cache_raises_value_error() -> None:
    kv_cache = cache()
    kv_cache.extend(1)
    layer = MultiHeadAttention(WIDTH, HEADS).double()
    with pytest.raises(ValueError, match="mask must be None with a cache"):
        layer(x()[:, :1], mask=Mask.causal(), cache=kv_cache.layer(0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_may_be_narrower_than_the_cache(implementation: AttnImplementation) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, HEADS, attn_implementation=implementation)
    kv_cache = KVCache(layers=1, batch=B, heads=HEADS, capacity=T, head_size=6)
    parts = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for part in x().float().split(PARTS, dim=1):
            kv_cache.extend(part.shape[1])
            parts.append(layer(part, cache=kv_cache.layer(0)))
    whole = layer(x().float(), mask=Mask.causal())
    assert_same_function(torch.cat(parts, dim=1), whole, dtype=torch.bfloat16)
