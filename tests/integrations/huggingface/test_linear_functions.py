"""Functions of linear layers: what the models of the tests do not pass, against transformers."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.integrations.huggingface.tiny_models import assert_close, transformers
from transformer_kernels.integrations.huggingface import linear_functions as ours
from transformer_kernels.integrations.huggingface.linear_functions import Call

B, T, H, P, N = 2, 6, 4, 8, 5
CALL = Call(T, None)
DOCUMENTS = torch.tensor([0, 2, 6, 6, 12], dtype=torch.int32)
"""Two in the first row; an empty one, and one in the second row."""


def theirs(family: str, name: str) -> Any:
    """Returns the function in torch of a family."""
    transformers()
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return inspect.unwrap(getattr(module, name))


def scan_arguments(tokens: tuple[int, ...] = (T,)) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "hidden_states": torch.randn(B, *tokens, H, P),
        "dt": torch.randn(B, *tokens, H),
        "A": -torch.rand(H),
        "B": torch.randn(B, *tokens, 2, N),
        "C": torch.randn(B, *tokens, 2, N),
        "D": torch.randn(H),
        "dt_bias": torch.randn(H),
    }


def test_documents_of_a_call() -> None:
    call, rows = Call(T, DOCUMENTS), torch.tensor([[1.0], [2.0]])
    assert call.shifted(3).tolist() == [0, 5, 9, 9, 18]
    states = call.states(rows)
    assert states is not None
    assert states.tolist() == [[1.0], [0.0], [0.0], [2.0]]
    assert call.last(torch.arange(4), B).tolist() == [1, 3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_scan(documents: Tensor | None) -> None:
    """With states, limits of the steps, and a gate, which transformers leaves to its layers."""
    x, z, states = scan_arguments(), torch.randn(B, T, H, P), torch.randn(B, H, P, N)
    more: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.1, 0.9), "chunk_size": 4}
    more |= {"return_final_states": True}
    function = theirs("mamba2", "mamba2_chunk_scan")
    if documents is None:
        o, after = function(**x, **more, initial_states=states)
    else:
        o, after = function(**x, **more, initial_states=states)
        cut = {name: one[:1] if one.dim() > 1 else one for name, one in x.items()}
        first = {name: one[:, :2] if one.dim() > 1 else one for name, one in cut.items()}
        second = {name: one[:, 2:] if one.dim() > 1 else one for name, one in cut.items()}
        o_first, _ = function(**first, **more, initial_states=states[:1])
        o_second, last = function(**second, **more)
        o = torch.cat([torch.cat([o_first, o_second], dim=1), o[1:]])
        after = torch.cat([last, after[1:]])
    actual, state = ours.scan(Call(T, documents), **x, **more, initial_states=states, z=z)
    assert_close(actual, o * functional.silu(z))
    assert_close(state, after)


@pytest.mark.exhaustive
def test_scan_without_options() -> None:
    x = {name: one for name, one in scan_arguments().items() if name not in ("D", "dt_bias")}
    x["dt"] = x["dt"].abs()
    o = ours.scan(CALL, **x)
    assert isinstance(o, Tensor)
    assert_close(o, theirs("mamba2", "mamba2_chunk_scan")(**x, chunk_size=4))


@pytest.mark.exhaustive
def test_scan_step() -> None:
    """With a gate, and A of each channel."""
    x = scan_arguments(())
    x["dt"] = x["dt"][..., None].expand(-1, -1, P)
    x |= {name: x[name][:, None].expand(-1, P) for name in ("D", "dt_bias")}
    for A in (x["A"][:, None, None].expand(-1, P, N), -torch.rand(H, P, N)):
        state = torch.randn(B, H, P, N)
        other, z = state.clone(), torch.randn(B, H, P)
        given: dict[str, Any] = x | {"A": A, "z": z, "dt_softplus": True}
        expected = theirs("mamba2", "mamba2_selective_state_update")(other, **given)
        assert_close(ours.scan_step(CALL, state, **given), expected)
        assert_close(state, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_convolution(activation: str | None, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, 3, T).to(dtypes[0])
    weight, bias = torch.randn(3, 4).to(dtypes[1]), torch.randn(3).to(dtypes[1])
    expected = theirs("mamba2", "causal_conv1d_fn")(x, weight, bias, activation)
    tolerance = 1e-5 if dtypes[0] == torch.float32 else 1e-2
    assert_close(ours.convolution(CALL, x, weight, bias, activation), expected, tolerance)
    for length, has_gradients in ((3, False), (4, False), (6, False), (4, True)):
        state = torch.randn(B, 3, length).to(dtypes[0])
        other = state.clone()
        with torch.set_grad_enabled(has_gradients):
            one = x[..., :1], state, weight, bias, activation
            actual = ours.convolution_step(CALL, *one)
        expected = theirs("mamba2", "causal_conv1d_update")(x[..., :1], other, *one[2:])
        assert_close(actual, expected, tolerance)
        assert torch.equal(state, other)


@pytest.mark.exhaustive
def test_calls_that_run_the_original() -> None:
    x, state = torch.randn(B, 3, T), torch.randn(B, 3, 8)
    assert ours.convolution(CALL, x, torch.randn(3, 9)) is NotImplemented
    assert ours.convolution_step(CALL, x, state, torch.randn(3, 4)) is NotImplemented
    assert ours.convolution_step(CALL, x[..., :1], state, torch.randn(3, 9)) is NotImplemented
    half = state.bfloat16()
    assert ours.convolution_step(CALL, x[..., :1], half, torch.randn(3, 4)) is NotImplemented
