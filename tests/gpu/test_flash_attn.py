"""The functions of flash_attn on a CUDA device: as on the CPU, where plain torch judges them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.flash_attn.plain import OPTIONS
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from transformer_kernels.integrations.flash_attn.bert_padding import pad_input, unpad_input

pytestmark = pytest.mark.gpu
ROWS = ("q", "k", "v", "k_cache", "v_cache", "x")
"""Names of arguments that are float64 in the exact call."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def to(device: str, x: Any) -> Any:
    """Copies tensors, and dicts of them, to a device; they require grad as before."""
    if isinstance(x, dict):
        return {name: to(device, value) for name, value in x.items()}
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def assert_as_on_the_cpu(call: Callable[..., Any], **arguments: Any) -> None:
    """Compares the results of `call`, and the tensors that it may have written, with those of the
    CPU in float64. The errors of the CPU in the same dtype set the tolerance."""
    wide = {
        name: x.detach().double().requires_grad_(x.requires_grad) if name in ROWS else x
        for name, x in arguments.items()
    }
    got, plain, exact = (
        results(call, given)
        for given in (to("cuda", arguments), to("cpu", arguments), to("cpu", wide))
    )
    for name, x in got.items():
        if x.is_floating_point():
            assert_within_rule(name, x, exact[name].double(), plain[name])
        else:
            assert torch.equal(x, plain[name]), name


def results(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Tensor]:
    """Results by number, and arguments by name, on the CPU."""
    found = {f"result {n}": x for n, x in enumerate(call(**given))}
    written = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    return {name: x.detach().cpu() for name, x in (found | written).items()}


def step(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """o, and the gradients of a sum over it."""
    o = call(q, k, v, **options)
    return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))


def drawn(*shape: int, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training(options: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = {
        name: drawn(3, length, heads, 64, dtype=dtype, requires_grad=True)
        for name, length, heads in (("q", 135, 4), ("k", 167, 2), ("v", 167, 2))
    }
    assert_as_on_the_cpu(partial(step, flash_attn_func), **tensors, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_sequences(options: dict[str, Any]) -> None:
    q = drawn(90, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (drawn(180, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    lengths = {"cu_seqlens_q": ends(3, 70, 17), "cu_seqlens_k": ends(5, 135, 40)}
    bounds = {"max_seqlen_q": 70, "max_seqlen_k": 135}
    call = partial(step, flash_attn_varlen_func)
    assert_as_on_the_cpu(call, q=q, k=k, v=v, **lengths, **bounds, **options)


@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (4, 9, 0), (3, 70, 17)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pages(options: dict[str, Any], lengths_q: tuple[int, ...]) -> None:
    """Read in place for few queries, else copied, without waiting for the device."""
    arguments = {
        "q": drawn(sum(lengths_q), 4, 64, dtype=torch.bfloat16),
        "k": drawn(12, 48, 2, 64, dtype=torch.bfloat16),
        "v": drawn(12, 48, 2, 64, dtype=torch.bfloat16),
        "cu_seqlens_q": ends(*lengths_q),
        "cu_seqlens_k": ends(33, 135, 144),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": 144,
        "block_table": torch.randperm(12)[:9].view(3, 3).int(),
    }

    def call(**given: Any) -> tuple[Tensor]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return (flash_attn_varlen_func(**given),)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert_as_on_the_cpu(call, **arguments, **options)


@pytest.mark.parametrize("kind", ["block_table", "cache_batch_idx"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cache(options: dict[str, Any], kind: str) -> None:
    """New keys are rotated and appended; some of the cache is left padding."""
    places = torch.randperm(9).view(3, 3) if kind == "block_table" else torch.tensor([4, 0, 2])
    angle = torch.rand(96, 16) * 6
    arguments = {
        "q": drawn(3, 2, 4, 64, dtype=torch.bfloat16),
        "k_cache": drawn(9, 32 if kind == "block_table" else 96, 2, 64, dtype=torch.bfloat16),
        "v_cache": drawn(9, 32 if kind == "block_table" else 96, 2, 64, dtype=torch.bfloat16),
        "k": drawn(3, 2, 2, 64, dtype=torch.bfloat16),
        "v": drawn(3, 2, 2, 64, dtype=torch.bfloat16),
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
        "cache_seqlens": torch.tensor([90, 0, 33], dtype=torch.int32),
        "cache_leftpad": torch.tensor([40, 0, 33], dtype=torch.int32),
        kind: places.int(),
    }
    call = partial(flash_attn_with_kvcache, return_softmax_lse=True)
    assert_as_on_the_cpu(call, **arguments, **options)


def test_padding() -> None:
    def call(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        tokens, indices, cu_seqlens, _, _ = unpad_input(x, mask)
        return pad_input(tokens, indices, *mask.shape), cu_seqlens

    mask = torch.rand(4, 50) < torch.tensor([[0.9], [0.0], [0.5], [1.0]])
    assert_as_on_the_cpu(call, x=torch.randn(4, 50, 3), mask=mask)


def gradient_of(qkv: Tensor) -> Tensor:
    o = flash_attn_qkvpacked_func(qkv, deterministic=True)
    return torch.autograd.grad(o.float().sum(), qkv)[0]


def test_deterministic_gradients_need_the_switch_of_torch() -> None:
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="use_deterministic_algorithms"):
        gradient_of(qkv)
    with torch.no_grad():
        flash_attn_qkvpacked_func(qkv, deterministic=True)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradients() -> None:
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first = gradient_of(qkv)
    assert all(torch.equal(gradient_of(qkv), first) for _ in range(5))
