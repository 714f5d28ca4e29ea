"""Streams, devices, determinism, memory and large offsets on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.gpu.on_device import Tensors, assert_same_bits, step, tensors
from tests.support.cases import CASES, Case
from tests.support.dropout_parts import HOPPER, Part, assert_part, assert_undivided_bits
from transformer_kernels.bench import peak_extra_bytes

pytestmark = pytest.mark.gpu
DETERMINISTIC = pytest.mark.usefixtures("deterministic")


@DETERMINISTIC
def test_it_runs_on_the_current_stream(backend: str) -> None:
    """The inputs are written after milliseconds of work; on another stream it would read zeros."""
    x = tensors()
    expected = step(x, backend, mask=tk.Mask.causal())
    late = tensors()
    for tensor in late:
        tensor.detach().zero_()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = busy @ busy * 1e-4
        with torch.no_grad():
            for to, tensor in zip(late, x, strict=True):
                to.copy_(tensor)
        got = step(late, backend, mask=tk.Mask.causal())
    stream.synchronize()
    assert_same_bits(got, expected)


@DETERMINISTIC
def test_it_runs_on_a_device_that_is_not_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, there is one")
    x = tensors()
    on_second = type(x)(*(y.detach().to("cuda:1").requires_grad_(y.requires_grad) for y in x))
    assert torch.cuda.current_device() == 0
    got = step(on_second, backend, mask=tk.Mask.causal())
    assert {y.device.index for y in got} == {1}
    assert_same_bits(tuple(y.to("cuda:0") for y in got), step(x, backend, mask=tk.Mask.causal()))


REPEATED = ("gqa-everything", "all-masks", "bias-1111", "bias-b1mn", "mqa", "many-keys")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in REPEATED], ids=str)
@DETERMINISTIC
def test_gradients_are_bit_identical_in_every_run(
    case: Case, dtype: torch.dtype, backend: str
) -> None:
    runs = [case.run(case.inputs(dtype, "cuda"), backend) for _ in range(6)]
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@DETERMINISTIC
def test_many_concurrent_blocks_are_bit_identical_in_every_run(backend: str) -> None:
    """Enough CTAs to expose races in sums over queries and keys."""
    x = tensors(H=8, M=2048, N=2048)
    first = step(x, backend, mask=tk.Mask.causal())
    for _ in range(5):
        assert_same_bits(step(x, backend, mask=tk.Mask.causal()), first)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": tk.Mask.causal()}, {"dropout_p": 0.1, "seed": 1}],
    ids=["full", "causal", "dropout"],
)
@DETERMINISTIC
def test_memory_is_linear_in_the_length(options: dict[str, Any], backend: str) -> None:
    """At S = 8192, one bfloat16 S x S matrix per head would be 128 MiB."""

    def peak(S: int) -> int:
        x = tensors(B=1, M=S, N=S)
        extra = peak_extra_bytes(lambda: lambda: step(x, backend, **options), x.q.device)
        assert extra is not None
        return extra

    short, long = peak(4096), peak(8192)
    assert long < 2.2 * short
    assert long < 32 * 2**20


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
@DETERMINISTIC
def test_strides_beyond_32_bits(name: str, dim: int, backend: str) -> None:
    need_gib(12)
    x = tensors(B=3, H=3, M=131, N=131)
    far = far_apart(getattr(x, name), dim)
    if name != "do":
        far.requires_grad_()
    assert_same_bits(step(x._replace(**{name: far}), backend), step(x, backend))


@DETERMINISTIC
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", HOPPER, ids=str)
def test_part(part: Part, dtype: torch.dtype, backend: str) -> None:
    assert_part(part, backend, dtype, device="cuda")


def test_parts_have_the_bits_of_the_undivided_call(backend: str) -> None:
    assert_undivided_bits(backend, device="cuda")
