"""Offsets beyond 2^31 elements, where a 32-bit index would overflow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.gpu.on_device import Tensors, assert_same_bits, step, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    """Frees cached memory, for tests in other processes."""
    yield
    torch.cuda.empty_cache()


def need_gib(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of memory on the device, {free / 2**30:.1f} are free")


def far_apart(x: Tensor, dim: int) -> Tensor:
    """Copy of x in which the last index of `dim` has an offset of more than 2^31 elements."""
    strides = list(x.contiguous().stride())
    strides[dim] = 2**31 // (x.shape[dim] - 1) + 128
    strides[dim] -= strides[dim] % 8
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) + 1
    far = torch.empty(extent, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    assert (x.shape[dim] - 1) * far.stride(dim) > 2**31
    return far.copy_(x.detach())


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "head", "length"])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_strides_beyond_32_bits(name: str, dim: int, backend: str) -> None:
    need_gib(12)
    x = tensors(B=3, H=3, M=131, N=131)
    far = far_apart(getattr(x, name), dim)
    if name != "do":
        far.requires_grad_()
    assert_same_bits(step(x._replace(**{name: far}), backend), step(x, backend))


def test_more_than_2_to_the_31_elements(backend: str) -> None:
    """q, o, do and dq are this large. The last rows must equal those of a call with only these."""
    need_gib(32)
    M, rows = 2**20 + 64, 131
    q, do = (torch.empty(2, 8, M, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for large in (q, do):
        large.normal_()
    assert q.numel() > 2**31
    k, v = (torch.randn(2, 8, 67, 128, dtype=q.dtype, device="cuda") for _ in range(2))
    q.requires_grad_()
    o = tk.attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(o, q, do)
    last = Tensors(q.detach()[:, :, -rows:].requires_grad_(), k, v, do[:, :, -rows:])
    o_last = tk.attention(*last[:3], backend=backend)
    (dq_last,) = torch.autograd.grad(o_last, last.q, last.do)
    torch.testing.assert_close(o[:, :, -rows:], o_last)
    torch.testing.assert_close(dq[:, :, -rows:], dq_last)
