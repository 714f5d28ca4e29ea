"""Streams, devices, determinism and memory on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.gpu.on_device import assert_same_bits, step, tensors
from tests.support.cases import CASES, Case
from transformer_kernels.bench import peak_extra_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


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
def test_gradients_are_bit_identical_in_every_run(
    case: Case, dtype: torch.dtype, backend: str
) -> None:
    runs = [case.run(case.inputs(dtype, "cuda"), backend) for _ in range(6)]
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


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
