"""The host side: the tensors that are copied before a launch."""

from __future__ import annotations

import torch

import transformer_kernels as tk
from transformer_kernels.backends.triton.launch import MAX_ROW_STRIDE, as_rows


def test_unit_stride_rows_are_not_copied() -> None:
    x = torch.zeros(2, 7, 3, 4)
    for view in (x, x.transpose(1, 2), x[:, :, :, 1:], x.expand(5, 2, 7, 3, 4)[0]):
        assert as_rows(view) is view
    assert as_rows(x.mT).is_contiguous()
    assert as_rows(x[..., ::2]).is_contiguous()


def test_rows_with_a_large_stride_are_copied(device: torch.device) -> None:
    """The row stride times the rows of a tile must fit in 32 bits."""
    memory = torch.randn(2 * MAX_ROW_STRIDE + 16, dtype=torch.float16, device=device)
    far = memory.as_strided((1, 1, 3, 16), (1, 1, MAX_ROW_STRIDE, 1))
    near = memory.as_strided((1, 1, 3, 16), (1, 1, MAX_ROW_STRIDE - 1, 1))
    assert as_rows(far).is_contiguous()
    assert as_rows(near) is near
    for x in (far, near):
        o = tk.attention(x, x, x, backend="triton")
        copy = x.contiguous()
        assert torch.equal(o, tk.attention(copy, copy, copy, backend="triton"))
