"""Linear self-attention: its definition, causality, padding, the state, errors."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from transformer_kernels import LinearState, Mask, alibi_slopes
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import LinearImplementation, LinearSelfAttention, linear_attention

WIDTH, HEADS = 12, 3
IMPLEMENTATIONS: tuple[LinearImplementation, ...] = get_args(LinearImplementation)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True},
    {"decay": True},
    {"causal": False},
    {"feature_map": "relu"},
    {"feature_map": torch.exp, "decay": True},
)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "plain")


def layer(implementation: LinearImplementation = "fused", **options: Any) -> LinearSelfAttention:
    """A layer in float64 with large random weights."""
    attention = LinearSelfAttention(
        WIDTH, HEADS, attn_implementation=implementation, **options
    ).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return attention


def x(T: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randn(batch, T, WIDTH, generator=generator, dtype=torch.float64)


def by_definition(attention: LinearSelfAttention, x: Tensor, options: dict[str, Any]) -> Tensor:
    """The layer from its weights, with a matrix of attention weights."""
    phi = {"relu": torch.relu, torch.exp: torch.exp}.get(
        options.get("feature_map", "elu"), lambda x: torch.where(x > 0, x + 1, x.exp())
    )
    heads = []
    for h in range(HEADS):
        rows = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
        q, k, v = (
            x @ f.weight[rows].T + (0.0 if f.bias is None else f.bias[rows])
            for f in (attention.queries, attention.keys, attention.values)
        )
        i = torch.arange(x.shape[1])
        weights = phi(q) @ phi(k).mT
        if options.get("decay"):
            weights = weights * torch.exp(-alibi_slopes(HEADS)[h].double() * (i[:, None] - i))
        if options.get("causal", True):
            weights = weights.tril()
        heads.append(weights @ v / (weights.sum(dim=-1, keepdim=True) + 1e-6))
    return torch.cat(heads, dim=-1) @ attention.out_proj.weight.T + attention.out_proj.bias


@every_implementation
@every_option
@pytest.mark.parametrize("T", [1, 7, 130])
def test_results_and_gradients_equal_the_definition(
    implementation: LinearImplementation, options: dict[str, Any], T: int
) -> None:
    attention, inputs = layer(implementation, **options), x(T).requires_grad_()
    of = [inputs, *attention.parameters()]
    y, expected = attention(inputs), by_definition(attention, inputs, options)
    assert_same_function(y, expected)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = (torch.autograd.grad(z, of, dy) for z in (y, expected))
    assert_same_function(*gradients)


def test_eager_is_plain_torch_and_fused_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
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


@every_implementation
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("length", [1, 4, 100])
def test_parts_with_a_state_equal_the_whole(
    implementation: LinearImplementation, decay: bool, length: int
) -> None:
    attention, inputs = layer(implementation, decay=decay), x(101)
    state = attention.new_state(2)
    shapes = [part.shape for part in state]
    parts = [attention(part, state=state) for part in inputs.split(length, dim=1)]
    assert_same_function(torch.cat(parts, dim=1), attention(inputs))
    assert [part.shape for part in state] == shapes == [(2, 3, 4, 4), (2, 3, 4)]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_state_is_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    """300 tokens in bfloat16: a state in bfloat16 would stop to grow at 256."""
    attention = layer().to(dtype)
    state = attention.new_state(2)
    assert {part.dtype for part in state} == {expected}
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_implementation": "sdpa"}, "must be one of 'eager', 'fused', got 'sdpa'"),
        ({"heads": 5}, "width must be a multiple of heads in the narrow form, got 12 and 5"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"decay": True, "causal": False}, "decay needs causal=True"),
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearSelfAttention(WIDTH, **{"heads": HEADS, **options})


def test_a_state_needs_a_causal_layer_without_a_mask() -> None:
    attention = layer()
    state, mask = attention.new_state(2), Mask.padding(torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="a state needs a causal layer and no mask, got causal=T"):
        attention(x(3), mask=mask, state=state)
    with pytest.raises(ValueError, match="got causal=False and mask=None"):
        layer(causal=False)(x(3), state=state)


def test_other_states_raise_value_error() -> None:
    attention = layer()
    with pytest.raises(ValueError, match=r"state.S must be \(2, 3, 4, 4\)"):
        attention(x(3), state=attention.new_state(1))
