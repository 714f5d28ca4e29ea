"""torch's transformer modules under `enable`: their inference fast paths run these kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_kernels as tk
from tests.support.operators import FORWARD, operators_run_by
from transformer_kernels.bench.tolerance import assert_same_function

Module = Callable[..., Tensor]


def attention() -> Module:
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()

    def run(x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        o: Tensor = module(x, x, x, need_weights=False, attn_mask=mask, key_padding_mask=padding)[0]
        return o

    return run


def layer(norm_first: bool = False, activation: str = "relu") -> Module:
    module = nn.TransformerEncoderLayer(
        16, 4, 32, 0.1, activation, norm_first=norm_first, batch_first=True
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def encoder() -> Module:
    one = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(one, 2).eval()


MODULES: dict[str, Callable[[], Module]] = {
    "attention": attention,
    "layer": layer,
    "layer-norm-first": lambda: layer(norm_first=True, activation="gelu"),
    "encoder": encoder,
}
SEQUENCES = [torch.randn(3, 16), torch.randn(1, 16), torch.randn(5, 16)]
NESTED = torch.nested.as_nested_tensor(SEQUENCES)
PADDED = torch.nested.to_padded_tensor(NESTED, 0.0)
PADDING = torch.arange(5) >= torch.tensor([[3], [1], [5]])
HIDDEN = torch.ones(5, 5).triu(1).bool()


def test_fast_path_setting_is_left_alone() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with tk.enabled():
        assert torch.backends.mha.get_fastpath_enabled() == before


@pytest.mark.quick
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@torch.no_grad()
def test_nested_tensors(make: Callable[[], Module]) -> None:
    module = make()
    expected = module(NESTED)
    with tk.enabled():
        assert FORWARD in operators_run_by(lambda: module(NESTED))
        got = module(NESTED)
    assert got.is_nested
    assert_same_function(got.unbind(), expected.unbind())


@pytest.mark.parametrize("masks", [(), ("padding",), ("causal",), ("padding", "causal")], ids=str)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@torch.no_grad()
def test_masks(make: Callable[[], Module], masks: tuple[str, ...]) -> None:
    module = make()
    padding = PADDING if "padding" in masks else None
    mask = HIDDEN if "causal" in masks else None
    inputs = PADDED, mask, padding
    expected = module(*inputs)
    with tk.enabled():
        ran = operators_run_by(lambda: module(*inputs))
        got = module(*inputs)
    assert FORWARD in ran
    assert "aten::_native_multi_head_attention" not in ran
    assert_same_function(got[~PADDING], expected[~PADDING])


@pytest.mark.parametrize("padding", [None, PADDING], ids=["full", "padded"])
def test_modules_in_training(padding: Tensor | None) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    x = PADDED
    runs: tuple[Callable[[], Tensor], ...] = (
        lambda: attention(x, x, x, need_weights=False, key_padding_mask=padding)[0],
        lambda: layer(x, src_key_padding_mask=padding),
    )
    for run in runs:
        expected = run()
        with tk.enabled():
            assert operators_run_by(run)[FORWARD] == 1
            got = run()
        assert_same_function(got[~PADDING], expected[~PADDING])


@torch.no_grad()
def test_need_weights_and_sdpa_kernel_run_torchs_operator() -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    for x in (PADDED, NESTED):
        expected, expected_weights = module(x, x, x)
        with tk.enabled():
            got, weights = module(x, x, x)
            with sdpa_kernel(SDPBackend.MATH):
                ran = operators_run_by(partial(module, x, x, x, need_weights=False))
        for one, other in ((got, expected), (weights, expected_weights)):
            assert_same_function(list(one.unbind()), list(other.unbind()))
        assert "aten::_native_multi_head_attention" in ran


@torch.no_grad()
def test_torch_script_compiles_torchs_operator() -> None:
    module = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    expected = module(PADDED)
    with tk.enabled():
        scripted = torch.jit.script(module)
        assert_same_function(scripted(PADDED), expected)
    assert_same_function(scripted(PADDED), expected)


@torch.no_grad()
def test_compiled_modules() -> None:
    module = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    expected = module(PADDED)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with tk.enabled():
        assert FORWARD in operators_run_by(lambda: compiled(PADDED))
        assert_same_function(compiled(PADDED), expected)
    assert FORWARD not in operators_run_by(lambda: compiled(PADDED))
    assert_same_function(compiled(PADDED), expected)
