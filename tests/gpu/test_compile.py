"""torch.compile on a CUDA device, with inductor and without graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.gpu.on_device import tensors

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": tk.Mask.causal()},
    "padding": {"mask": tk.Mask.padding(torch.tensor([193, 60]))},
    "segments": {"mask": tk.Mask.segments(torch.arange(193).expand(2, -1) // 70)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "softcap": {"softcap": 2.0, "scale": 0.2},
}


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to("cuda") if isinstance(x, tk.Mask) else x for name, x in options.items()}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_and_backward_compile_to_one_graph_each(
    options: dict[str, Any], backend: str
) -> None:
    """Inductor fuses the operations around attention."""
    moved = on_device(options)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = tk.attention(q * 2, k, v, **moved, backend=backend)
        return torch.nn.functional.gelu(o)

    x = tensors(dtype=torch.float32)
    fast: Callable[..., Tensor] = torch.compile(layer, fullgraph=True)
    o, expected = fast(*x[:3]), layer(*x[:3])
    got = (o, *torch.autograd.grad(o, x[:3], x.do))
    eager = (expected, *torch.autograd.grad(expected, x[:3], x.do))
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)


def test_dynamic_lengths_compile(backend: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = tk.attention(q, k, v, mask=tk.Mask.causal(), backend=backend)
        return o + 1

    fast: Callable[..., Tensor] = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (71, 90, 133):
        x = tensors(M=length, N=length, dtype=torch.float32)
        torch.testing.assert_close(fast(*x[:3]), layer(*x[:3]))
