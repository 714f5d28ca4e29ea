"""`torch.fx.symbolic_trace` makes a call of a public function one node of its graph."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import transformer_kernels as tk
from transformer_kernels import attention

IDS = torch.arange(2 * 13).reshape(2, 13) // 5
ENDS = torch.tensor([0, 5, 5, 13])
LENGTHS = torch.tensor([13, 4])


class Layer(nn.Module):
    """Masks and biases whose tensors are buffers, parameters and neither."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.rand(4))
        self.keys = nn.Parameter(torch.randn(4, 5, 8))
        self.table = nn.Parameter(torch.randn(1, 5))
        self.register_buffer("ids", IDS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = tk.Mask.causal() & tk.Mask.segments(self.ids) & tk.Mask.padding(LENGTHS)
        o = tk.attention(q, k, v, mask=mask, bias=tk.alibi(self.slopes), softcap=5.0)
        relative = tk.relative_keys(self.keys, table=self.table, lowest=-2)
        o, lse = attention(self.out_proj(o), k, v, relative=relative, return_lse=True)
        return o + lse[..., None]


def packed(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v: call(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1))


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bias": (tk.attention, lambda q, k, v: tk.attention(q, k, v, bias=q @ k.mT)),
    "relative": (
        tk.attention,
        lambda q, k, v: tk.attention(q, k, v, relative=tk.relative_bias(q[0, :, 0], lowest=-1)),
    ),
    "sdpa": (
        tk.scaled_dot_product_attention,
        lambda q, k, v: tk.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    "varlen": (tk.attention_varlen, packed(lambda q, k, v: tk.attention_varlen(q, k, v, ENDS))),
    "decode": (tk.attention_decode, lambda q, k, v: tk.attention_decode(q, k, v, LENGTHS)),
    "linear": (tk.linear_attention, lambda q, k, v: tk.linear_attention(q, k, v, eps=1.0)),
    "linear varlen": (
        tk.linear_attention_varlen,
        packed(lambda q, k, v: tk.linear_attention_varlen(q, k, v, ENDS)),
    ),
    "linear decode": (
        tk.linear_attention_decode,
        lambda q, k, v: tk.linear_attention_decode(
            q, k, v, tk.LinearState(v.new_zeros(2, 4, 8, 8), v.new_zeros(2, 4, 8))
        ),
    ),
}


def inputs() -> list[Tensor]:
    return [torch.randn(2, 4, 13, 8) for _ in range(3)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_node(name: str) -> None:
    function, call = CALLS[name]
    traced, x = pickle.loads(pickle.dumps(symbolic_trace(call))), inputs()
    assert [node.target for node in traced.graph.nodes].count(function) == 1
    assert torch.equal(traced(*x), call(*x))


def test_a_traced_module_has_the_same_results_and_gradients() -> None:
    layer, x = Layer(), inputs()
    traced = symbolic_trace(layer)
    parameters = list(layer.parameters())
    for of_layer, of_traced in zip(
        (layer(*x), *torch.autograd.grad(layer(*x).sum(), parameters)),
        (traced(*x), *torch.autograd.grad(traced(*x).sum(), parameters)),
        strict=True,
    ):
        assert torch.equal(of_layer, of_traced)
    node, _ = traced.graph.find_nodes(op="call_function", target=attention)
    assert set(node.kwargs) == {"mask", "bias", "softcap"}


def test_tensor_subclasses_are_tensors() -> None:
    seen = []

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *call: Any) -> Any:
            seen.append(function)
            return super().__torch_function__(function, *call)  # type: ignore[no-untyped-call]

    q, k, v = inputs()
    o = tk.attention(q.as_subclass(Subclass), k, v)
    assert seen
    assert attention not in seen
    assert torch.equal(o, tk.attention(q, k, v))
