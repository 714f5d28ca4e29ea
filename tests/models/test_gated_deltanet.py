"""The layer of Gated DeltaNet against its definition, and the hybrid model."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from tests.models.zoo import entry_of, randn, result_and_gradients, tokens
from tests.support.tiers import each
from transformer_kernels import models
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import (
    GatedDeltaRuleAttention,
    LinearImplementation,
    MultiHeadAttention,
    delta_attention,
)

WIDTH = 12
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 6, "key_heads": 3, "head_size": 5},
    {"heads": 1, "kernel_size": 2},
)

every_implementation = pytest.mark.parametrize("implementation", get_args(LinearImplementation))


def layer(
    implementation: LinearImplementation = "fused", **options: Any
) -> GatedDeltaRuleAttention:
    """A layer in float64 with large weights."""
    options = {"heads": 3, **options}
    attention = GatedDeltaRuleAttention(WIDTH, attn_implementation=implementation, **options)
    with torch.no_grad():
        for n, parameter in enumerate(attention.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=n))
    return attention.double()


def x(T: int) -> Tensor:
    return randn(2, T, WIDTH, seed=T)


def by_definition(attention: GatedDeltaRuleAttention, x: Tensor) -> Tensor:
    """The layer from its weights, token by token and head by head."""
    W, D, shared = (
        attention.kernel.shape[1], attention.head_size, attention.heads // attention.key_heads
    )  # fmt: skip
    channels = pad(x @ attention.queries_keys_values.weight.T, (0, 0, W - 1, 0))
    windows = channels.unfold(1, W, 1)
    mixed = (windows * attention.kernel).sum(dim=-1)
    mixed = mixed * torch.sigmoid(mixed)
    gate = x @ attention.output_gate.weight.T
    step = softplus(x @ attention.decay.weight.T + attention.time_bias)
    kept = torch.exp(-attention.log_rate.exp() * step)
    beta = torch.sigmoid(x @ attention.beta.weight.T)
    heads = []
    for h in range(attention.heads):
        starts = (h // shared, attention.key_heads + h // shared, 2 * attention.key_heads + h)
        q, k, v = (mixed[..., n * D : (n + 1) * D] for n in starts)
        q, k = (y / (y.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        S, rows = x.new_zeros(len(x), D, D), []
        for t in range(x.shape[1]):
            S = kept[:, t, h, None, None] * S
            missing = v[:, t] - (S.mT @ k[:, t, :, None])[..., 0]
            S = S + beta[:, t, h, None, None] * k[:, t, :, None] * missing[:, None]
            rows.append((S.mT @ q[:, t, :, None])[..., 0] / math.sqrt(D))
        o = torch.stack(rows, dim=1)
        o = o / (o.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * attention.norm.weight
        z = gate[..., h * D : (h + 1) * D]
        heads.append(o * z * torch.sigmoid(z))
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.T


@pytest.mark.exhaustive
@every_implementation
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("T", [1, 3, 70])
def test_layer_equals_its_definition(
    implementation: LinearImplementation, options: dict[str, Any], T: int
) -> None:
    attention, inputs = layer(implementation, **options), x(T).requires_grad_()
    y, expected = (
        result_and_gradients(z, inputs, *attention.parameters())
        for z in (attention(inputs), by_definition(attention, inputs))
    )
    assert_same_function(y, expected)


@pytest.mark.exhaustive
@every_implementation
@pytest.mark.parametrize("counts", [[70], [1] * 20, [2, 1, 66, 1]], ids=str)
def test_parts_with_a_state_equal_the_whole(
    implementation: LinearImplementation, counts: list[int]
) -> None:
    attention, inputs = layer(implementation, **OPTIONS[1]), x(sum(counts))
    state = attention.new_state(2)
    before = [part.data_ptr() for part in state]
    parts = [attention(part, state=state) for part in inputs.split(counts, dim=1)]
    assert_same_function(torch.cat(parts, dim=1), attention(inputs))
    assert [part.data_ptr() for part in state] == before
    assert [tuple(part.shape) for part in state] == [(2, 6, 5, 5), (2, 60, 3)]


def test_eager_is_plain_torch_and_fused_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, str]] = []
    for name in ("causal_conv1d", "gated_delta_rule", "gated_delta_rule_step"):
        plain = getattr(delta_attention, name)

        def call(*tensors: Any, plain: Any = plain, name: str = name, **options: Any) -> Any:
            found.append((name, options["backend"]))
            return plain(*tensors, **options)

        monkeypatch.setattr(delta_attention, name, call)
    for implementation in get_args(LinearImplementation):
        attention = layer(implementation)
        attention(x(3))
        attention(x(3), state=attention.new_state(2))
        attention(x(1), state=attention.new_state(2))
    names = ["causal_conv1d", "gated_delta_rule"] * 2 + ["causal_conv1d", "gated_delta_rule_step"]
    assert found == [(name, backend) for backend in ("reference", "auto") for name in names]


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_state_is_at_least_float32(dtype: torch.dtype) -> None:
    attention = layer().to(dtype)
    state = attention.new_state(2)
    y = attention(x(5).to(dtype), state=state)
    assert y.dtype == dtype
    assert state.S.dtype == torch.promote_types(dtype, torch.float32)
    assert state.inputs.dtype == dtype


def test_with_a_state_autograd_does_not_apply_to_the_delta_rule() -> None:
    attention = layer()
    attention(x(3), state=attention.new_state(2)).sum().backward()
    assert attention.out_proj.weight.grad is not None
    assert attention.kernel.grad is None
    assert attention.log_rate.grad is None


@every_implementation
def test_layer_runs_under_autocast(implementation: LinearImplementation) -> None:
    attention = layer(implementation).float()
    inputs = x(20).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(inputs)
        state = attention.new_state(2)
        again = torch.cat([attention(part, state=state) for part in inputs.split([18, 1, 1], 1)], 1)
    assert y.dtype == torch.bfloat16
    assert_same_function(y, attention(inputs), dtype=torch.bfloat16)
    assert_same_function(again, y, dtype=torch.bfloat16)
    y.sum().backward()
    assert attention.log_rate.grad is not None
    assert attention.kernel.grad is not None


@each(
    ("options", "message"),
    [
        ({"attn_implementation": "sdpa"}, "must be one of 'eager', 'fused', got 'sdpa'"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"key_heads": 2}, "key_heads must divide heads, got 2 and 3"),
        ({"key_heads": 0}, "key_heads must be a whole number of at least 1, got 0"),
        ({"kernel_size": 9}, "kernel_size must be from 2 to 8, got 9"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedDeltaRuleAttention(WIDTH, **{"heads": 3, **options})


def test_rates_and_time_steps_start_in_their_ranges() -> None:
    attention = GatedDeltaRuleAttention(512, 512)
    rates, steps = attention.log_rate.exp(), softplus(attention.time_bias)
    assert 0.0 < rates.min() < 0.5
    assert 15.5 < rates.max() <= 16.0
    assert rates.mean().item() == pytest.approx(8.0, rel=0.2)
    assert 0.99e-3 < steps.min() < 1.1e-3
    assert 0.09 < steps.max() < 0.101
    assert steps.log().mean().exp().item() == pytest.approx(1e-2, rel=0.3)
    assert attention.kernel.abs().max().item() == pytest.approx(0.5, rel=1e-3)


# The model


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("every", "attentions"), [(4, (3, 7)), (3, (2, 5)), (1, tuple(range(8))), (0, ()), (9, ())]
)
def test_every_so_many_layers_one_is_attention(every: int, attentions: tuple[int, ...]) -> None:
    model = entry_of("gated-deltanet").build(layers=8, attention_every=every)
    for n, block in enumerate(model.blocks):
        kind = MultiHeadAttention if n in attentions else GatedDeltaRuleAttention
        assert type(block.attention) is kind
    state = model.new_state(3)
    assert len(state.delta) == 8 - len(attentions)
    assert (state.cache is None) == (not attentions)
    text = tokens(14)
    parts = [model(part, state)[0] for part in text.split([9, 1, 4], dim=1)]
    assert_same_function(torch.cat(parts, dim=1), model(text))


def test_only_the_cache_of_the_state_grows() -> None:
    """At least to double its capacity, which is that of the context at first."""
    model = entry_of("gated-deltanet").build()
    state = model.new_state(3)
    for count, capacity in ((10, 12), (2, 12), (1, 24), (12, 48), (50, 96), (200, 275)):
        _, same = model(tokens(count), state)
        assert same is state
        assert (state.cache.capacity, state.cache.keys.shape[0]) == (capacity, 1)
        assert [tuple(part.shape) for part in state.delta[0]] == [(3, 2, 8, 8), (3, 48, 3)]
    assert state.cache.length == 275


def test_other_states_raise_value_error() -> None:
    model, alone = (entry_of("gated-deltanet").build(attention_every=n) for n in (2, 0))
    for other in (model.new_state(1), alone.new_state(3)):
        with pytest.raises(ValueError, match=r"state must have .* of the sizes \(\[\(3, 2\)\], \("):
            model(tokens(3), other)
    with pytest.raises(ValueError, match=r"of the sizes \(\[\(3, 2\), \(3, 2\)\], None\), got"):
        alone(tokens(3), model.new_state(3))


def test_sdpa_is_refused_without_a_delta_layer_too() -> None:
    config = models.GatedDeltaNetConfig(layers=1, heads=2, width=16, context=4, attention_every=1)
    with pytest.raises(ValueError, match="must be one of 'eager', 'fused', got 'sdpa'"):
        models.GatedDeltaNet(config, attn_implementation="sdpa")
