"""Bool tensors whose bytes are not 0 or 1: any byte but 0 is True, as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from transformer_kernels.bench.tolerance import assert_same_function

B, H, M, N, D = 2, 2, 70, 133, 16
BYTES = torch.tensor([1, 2, 3, 64, 127, 128, 254, 255], dtype=torch.uint8)


def as_bytes(visible: Tensor) -> Tensor:
    """The same bool tensor, with various bytes for True; the same strides."""
    n = torch.arange(visible.numel()).view(visible.shape) * 5 % 8
    odd = torch.empty_like(visible, dtype=torch.uint8).copy_(BYTES[n] * visible)
    return odd.view(torch.bool)


def visible(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


def blocky(*shape: int) -> Tensor:
    """Empty, partial and full blocks of 64 x 64."""
    x = visible(*shape)
    x[..., :64, :64] = True
    x[..., :64, 64:128] = False
    return x


DENSE = {
    "elements": blocky(B, H, M, N),
    "everything": torch.ones(1, 1, M, N, dtype=torch.bool),
    "keys": visible(B, 1, 1, N),
    "queries": visible(1, H, M, 1),
    "transposed": visible(1, 1, N, M).mT,
    "every-third": visible(M, N * 3)[None, None, :, ::3],
}
LAYOUTS = {"16": visible(H, 5, 9), "100": visible(1, 1, 2)}


def compare(masks: list[tk.Mask], backend: str, **options: Any) -> None:
    """Outputs and gradients of both masks are equal to the bit."""
    q = torch.randn(B, H, M, D, requires_grad=True)
    k, v = (torch.randn(B, H, N, D, requires_grad=True) for _ in range(2))
    found = []
    for mask in masks:
        o = tk.attention(q, k, v, mask=mask, backend=backend, **options)
        found.append((o, *torch.autograd.grad(o.sin().sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert torch.equal(*(mask.materialize(B, H, M, N) for mask in masks))


@pytest.mark.quick
@pytest.mark.parametrize("name", DENSE)
def test_dense_masks(name: str, backend: str) -> None:
    odd = as_bytes(DENSE[name])
    assert odd.stride() == DENSE[name].stride() or name == "every-third"
    compare([tk.Mask.dense(odd), tk.Mask.dense(DENSE[name])], backend)


@pytest.mark.parametrize("size", LAYOUTS)
def test_block_layouts(size: str, backend: str) -> None:
    layouts = as_bytes(LAYOUTS[size]), LAYOUTS[size]
    compare([tk.Mask.block_sparse(layout, int(size)) for layout in layouts], backend)


def test_conjunctions(backend: str) -> None:
    plain = DENSE["elements"], DENSE["keys"], LAYOUTS["16"], LAYOUTS["100"]
    masks = []
    for a, b, c, d in (map(as_bytes, plain), plain):
        mask = tk.Mask.dense(a) & tk.Mask.dense(b)
        masks.append(mask & tk.Mask.block_sparse(c, 16) & tk.Mask.block_sparse(d, 100))
    compare(masks, backend, softcap=9.0)


def test_drop_in() -> None:
    q = torch.randn(B, H, M, D)
    k, v = (torch.randn(B, H, N, D) for _ in range(2))
    for mask in (as_bytes(DENSE["elements"]), as_bytes(DENSE["transposed"])[0, 0]):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert_same_function(tk.scaled_dot_product_attention(q, k, v, mask), want)
        with tk.enabled():
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert_same_function(o, want)
