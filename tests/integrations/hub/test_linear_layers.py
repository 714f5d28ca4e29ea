"""The kernel "linear-layers" in hybrid models of transformers, by `kernels.kernelize`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch

from tests.integrations.huggingface import families
from tests.integrations.huggingface.hybrid_models import CU_SEQLENS, LENGTHS
from tests.integrations.huggingface.tiny_models import assert_same_run, generated
from transformer_kernels.integrations.hub import layers
from transformer_kernels.integrations.huggingface import register

pytestmark = pytest.mark.exhaustive

LAYERS = {
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
    "chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "chunk_kda": "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    "fused_recurrent_kda": "recurrent_gated_delta_rule",
}
"""Names of transformers' mapping, and our layers for them."""
FAMILIES = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear")


def kernelize(model: Any, names: dict[str, str]) -> None:
    """Runs these layers of the kernel on the CPU, and the model's own in place of all others."""
    import kernels

    mapping = {
        name: {"cpu": kernels.LayerRepository("tk/linear-layers", layer_name=ours, revision="v0")}
        for name, ours in names.items()
    }
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    register(linear_layers=False)
    built = families.built(request.param, "eager")
    register(linear_layers=False)  # it would take the place of the functions
    yield built
    kernelize(built, {})  # the functions are those of all models
    register()


def called(model: Any) -> set[str]:
    """Names of the functions that the layers of a model call by our kernel."""
    functions = [vars(layer).get("_kernel_funcs", {}).values() for layer in model.modules()]
    return {
        one.kernel_layer_name
        for one in chain.from_iterable(functions)
        if one.forward.__func__.__module__.endswith(".hub.layers")
    }


def test_agrees_with_torch(model: Any) -> None:
    """Outputs, gradients and greedy tokens."""
    expected = families.run(model, "right"), generated(model)
    kernelize(model, LAYERS)
    assert len(called(model)) == 4
    assert_same_run(families.run(model, "right"), expected[0])
    assert torch.equal(generated(model), expected[1])


def test_packed_documents(model: Any) -> None:
    """Each as if it were alone."""
    kernelize(model, LAYERS)
    layer = next(one for one in model.modules() if "_kernel_funcs" in vars(one))
    x = torch.randn(1, 21, model.config.hidden_size)
    expected = [layer(part) for part in x.split(LENGTHS, dim=1)]
    packed = layer(x, cu_seq_lens_q=CU_SEQLENS)
    torch.testing.assert_close(packed, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="seq_idx needs the boundaries"):
        layer(x, seq_idx=torch.zeros(1, 21, dtype=torch.int32))


def test_compiled() -> None:
    q, k, v = torch.randn(3, 1, 9, 2, 8)
    g, beta = -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    for layer, arguments in (
        (layers.chunk_gated_delta_rule(), (q, k, v, g, beta)),
        (layers.causal_conv1d_fn(), (x, weight, None, "silu")),
    ):
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), layer(*arguments))


def test_unsupported_convolutions() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(6, 9\)"):
        layers.causal_conv1d_fn()(torch.randn(1, 6, 9), torch.randn(6, 9))
