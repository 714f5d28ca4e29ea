"""Tensors made under torch.inference_mode, and FakeTensorMode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_kernels as tk

B, H, M, D = 2, 2, 70, 8
LENGTHS, STARTS = torch.tensor([60, 9]), torch.tensor([0, 30, M])
IDS = (torch.arange(M) // 20).expand(B, M)

MASKS: dict[str, Callable[[], tk.Mask]] = {
    "padding": lambda: tk.Mask.padding(LENGTHS.clone()),
    "key-range": lambda: tk.Mask.key_range(LENGTHS // 3, LENGTHS.int()),
    "segments": lambda: tk.Mask.segments(IDS.clone()),
    "positions": lambda: tk.Mask.positions(IDS.clone(), IDS.clone(), 1, 1),
    "dense": lambda: tk.Mask.dense(torch.arange(M * M).view(M, M) % 3 > 0),
    "blocks": lambda: tk.Mask.block_sparse(torch.ones(2, 2).bool().triu(), 64),
    "causal-padding": lambda: tk.Mask.causal() & tk.Mask.padding(LENGTHS.clone()),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
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
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_inference_mode_can_be_trained_with(mask: str, backend: str) -> None:
    with torch.inference_mode():
        made = MASKS[mask]()
    expected = gradients(mask=MASKS[mask](), backend=backend)
    for ours, wanted in zip(gradients(mask=made, backend=backend), expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_inference_mode_can_be_trained_with(name: str, backend: str) -> None:
    with torch.inference_mode():
        made = OPTIONS[name]() | {"mask": MASKS["padding"]()}
    expected = gradients(backend=backend, **(OPTIONS[name]() | {"mask": MASKS["padding"]()}))
    for ours, wanted in zip(gradients(backend=backend, **made), expected, strict=True):
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
