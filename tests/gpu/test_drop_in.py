"""Other ways to call attention on a CUDA device: flash_attn, xFormers, `enable`, torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import transformer_kernels as tk
from tests.gpu import on_device
from tests.integrations.flash_attn.plain import OPTIONS
from tests.integrations.test_xformers import ALL, drawn_for
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from transformer_kernels.integrations.flash_attn.bert_padding import pad_input, unpad_input
from transformer_kernels.integrations.xformers import AttentionBias, memory_efficient_attention

pytestmark = pytest.mark.gpu
ROWS = ("q", "k", "v", "k_cache", "v_cache", "x")
"""Names of arguments that are float64 in the exact call."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _off_and_nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    tk.disable()
    yield
    tk.disable()


def to(device: str, x: Any) -> Any:
    """Copies tensors, masks, and dicts of them, to a device; they require grad as before."""
    if isinstance(x, dict):
        return {name: to(device, value) for name, value in x.items()}
    if isinstance(x, tk.Mask | AttentionBias):
        return x.to(device)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_biases_of_xformers(name: str, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in drawn_for(name, dtype))
    call = partial(step, memory_efficient_attention)
    assert_as_on_the_cpu(call, q=q, k=k, v=v, attn_bias=ALL[name])


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


def ours_in(call: Callable[[], object]) -> int:
    """Returns how often an operator of any of our backends ran during `call()`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name.startswith("transformer_kernels::") for event in profiler.events())


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=str)
def test_training_under_enable(options: dict[str, Any], dtype: torch.dtype) -> None:
    def one() -> Tensor:
        return torch.randn(2, 4, 193, 64, device="cuda", dtype=dtype, requires_grad=True)

    qkv, cotangent = (one(), one(), one()), torch.randn(2, 4, 193, 64, device="cuda", dtype=dtype)

    def step() -> tuple[Tensor, ...]:
        o = functional.scaled_dot_product_attention(*qkv, **options)
        return (o, *torch.autograd.grad(o, qkv, cotangent))

    expected = step()
    assert ours_in(step) == 0
    with tk.enabled():
        assert ours_in(step) >= 2
        assert_close(step(), expected)
        with sdpa_kernel(SDPBackend.MATH):
            assert ours_in(step) == 0


def test_jagged_tensors_under_enable() -> None:
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (3, 190, 1)]
    x = torch.nested.as_nested_tensor(rows, layout=torch.jagged).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        q = x.transpose(1, 2)
        o = functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
        (dx,) = torch.autograd.grad(o.values().float().square().sum(), x)
        return o.values(), dx.values()

    expected = step()
    with tk.enabled():
        assert ours_in(step) >= 2
        assert_close(step(), expected)


@torch.no_grad()
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_modules_under_enable(nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval().cuda().half()
    rows = [torch.randn(n, 64, device="cuda", dtype=torch.float16) for n in (130, 1, 77)]
    x = torch.nested.as_nested_tensor(rows) if nested else rows[0][None]
    expected = layer(x)
    with tk.enabled():
        assert ours_in(lambda: layer(x)) >= 1
        got = layer(x)
    assert_close(list(got.unbind()), list(expected.unbind()))


def test_compiled_under_enable() -> None:
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    compiled = torch.compile(functional.scaled_dot_product_attention, fullgraph=True)
    expected = compiled(q, k, v)
    with tk.enabled():
        assert ours_in(lambda: compiled(q, k, v)) >= 1
        assert_close(compiled(q, k, v), expected)


COMPILED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": tk.Mask.causal()},
    "padding": {"mask": tk.Mask.padding(torch.tensor([193, 60]))},
    "segments": {"mask": tk.Mask.segments(torch.arange(193).expand(2, -1) // 70)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "softcap": {"softcap": 2.0, "scale": 0.2},
}


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_forward_and_backward_compile_to_one_graph_each(
    options: dict[str, Any], backend: str
) -> None:
    """Inductor fuses the operations around attention."""
    moved = to("cuda", options)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = tk.attention(q * 2, k, v, **moved, backend=backend)
        return torch.nn.functional.gelu(o)

    x = on_device.tensors(dtype=torch.float32)
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
        x = on_device.tensors(M=length, N=length, dtype=torch.float32)
        torch.testing.assert_close(fast(*x[:3]), layer(*x[:3]))
