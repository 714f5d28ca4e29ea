"""Tensors made under torch.inference_mode, FakeTensorMode, and symbolic tracing by torch.fx."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace

import transformer_kernels as tk
from transformer_kernels import attention

B, H, M, D = 2, 2, 70, 8
LENGTHS, STARTS = torch.tensor([60, 9]), torch.tensor([0, 30, M])
IDS = (torch.arange(M) // 20).expand(B, M)

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "padding": lambda: {"mask": tk.Mask.padding(LENGTHS.clone())},
    "key-range": lambda: {"mask": tk.Mask.key_range(LENGTHS // 3, LENGTHS.int())},
    "segments": lambda: {"mask": tk.Mask.segments(IDS.clone())},
    "positions": lambda: {"mask": tk.Mask.positions(IDS.clone(), IDS.clone(), 1, 1)},
    "dense": lambda: {"mask": tk.Mask.dense(torch.arange(M * M).view(M, M) % 3 > 0)},
    "blocks": lambda: {"mask": tk.Mask.block_sparse(torch.ones(2, 2).bool().triu(), 64)},
    "causal-padding": lambda: {"mask": tk.Mask.causal() & tk.Mask.padding(LENGTHS.clone())},
    "bias": lambda: {"bias": torch.arange(M * M).view(M, M).float() % 7},
    "slopes": lambda: {"bias": tk.alibi(torch.ones(H) / 9)},
    "table": lambda: {"relative": tk.relative_bias(torch.arange(9.0)[None], lowest=-4)},
    "keys": lambda: {
        "relative": tk.relative_keys(torch.arange(9.0 * D).reshape(1, 9, D) / 99, lowest=-4)
    },
    "sinks": lambda: {"sinks": torch.ones(H)},
    "seed": lambda: {"dropout_p": 0.5, "seed": torch.tensor(3)},
}


def gradients(**options: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, M, D, generator=generator) for _ in range(3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o: Tensor = tk.attention(q, k, v, **options)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v))


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_inference_mode_can_be_trained_with(name: str, backend: str) -> None:
    def make() -> dict[str, Any]:
        return OPTIONS["padding"]() | {"backend": backend} | OPTIONS[name]()

    with torch.inference_mode():
        made = make()
    for ours, wanted in zip(gradients(**made), gradients(**make()), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"backend": "reference"}])
@pytest.mark.parametrize("frozen", range(3))
def test_inputs_of_inference_mode_can_be_trained_with(frozen: int, options: Any) -> None:
    inputs = [torch.randn(B, H, M, D) for _ in range(3)]
    with torch.inference_mode():
        inference = inputs[frozen].clone()
    trained = [x.requires_grad_() for n, x in enumerate(inputs) if n != frozen]
    results = []
    for x in (inputs[frozen].detach(), inference):
        inputs[frozen] = x
        o: Tensor = tk.attention(*inputs, **options)
        results.append((o, *torch.autograd.grad(o.square().sum(), trained)))
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


def test_varlen_starts_of_inference_mode_can_be_trained_with() -> None:
    q = torch.randn(M, H, D, requires_grad=True)
    with torch.inference_mode():
        starts = STARTS.int().clone()
    grads = [
        torch.autograd.grad(tk.attention_varlen(q, q, q, given).sum(), q)[0]
        for given in (STARTS, starts)
    ]
    assert torch.equal(*grads)


def test_decoding_runs_in_fake_mode() -> None:
    with FakeTensorMode():
        q, cache = torch.empty(B, H, 1, D), torch.empty(4, H, 16, D)
        lengths, table = torch.empty(B, dtype=torch.int64), torch.empty(B, 2, dtype=torch.int32)
        o, lse = tk.attention_decode(q, cache, cache, lengths, table, return_lse=True)
        assert o.shape == q.shape
        assert lse.shape == (B, H, 1)
        assert tk.attention_decode(q, cache[:B], cache[:B], lengths).shape == q.shape
        tk.append_to_cache(cache, cache.clone(), q, q, lengths, table)


def test_varlen_runs_in_fake_mode_if_max_seqlen_is_given() -> None:
    with FakeTensorMode():
        q, starts = torch.empty(M, H, D, requires_grad=True), torch.empty(3, dtype=torch.int64)
        o = tk.attention_varlen(q, q, q, starts, max_seqlen_q=40)
        (dq,) = torch.autograd.grad(o.sum(), q)
        assert o.shape == dq.shape == q.shape
        with pytest.raises(ValueError, match="max_seqlen_q must be an int, got None, and cu_seq"):
            tk.attention_varlen(q, q, q, starts)


def test_attention_runs_in_fake_mode() -> None:
    with FakeTensorMode():
        q = torch.empty(B, H, M, D, requires_grad=True)
        o = tk.attention(q, q, q, mask=tk.Mask.causal())
        assert torch.autograd.grad(o.sum(), q)[0].shape == o.shape == q.shape


CACHED, ENDS = torch.tensor([13, 4]), torch.tensor([0, 5, 5, 13])


class Layer(nn.Module):
    """Masks and biases whose tensors are buffers, parameters and neither."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(8, 8)
        self.slopes = nn.Parameter(torch.rand(4))
        self.keys = nn.Parameter(torch.randn(4, 5, 8))
        self.table = nn.Parameter(torch.randn(1, 5))
        self.register_buffer("ids", torch.arange(2 * 13).reshape(2, 13) // 5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = tk.Mask.causal() & tk.Mask.segments(self.ids) & tk.Mask.padding(CACHED)
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
    "decode": (tk.attention_decode, lambda q, k, v: tk.attention_decode(q, k, v, CACHED)),
    "weights": (tk.attention_weights, lambda q, k, v: tk.attention_weights(q, k, rows=[-1, 2])),
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
    "convolution": (
        tk.causal_conv1d,
        lambda q, k, v: tk.causal_conv1d(q[0], k[0, 0], activation="silu", backend="cpu"),
    ),
    "convolution step": (
        tk.causal_conv1d_step,
        lambda q, k, v: tk.causal_conv1d_step(q[0], k[0, 0], None, v[0, :, :, 1:].clone()),
    ),
}


def inputs() -> list[Tensor]:
    return [torch.randn(2, 4, 13, 8) for _ in range(3)]


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_call_is_one_node(name: str) -> None:
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
