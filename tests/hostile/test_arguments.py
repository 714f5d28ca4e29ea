"""Hostile arguments: a ValueError or TypeError that names the argument, never torch's own error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import operators_of
from tests.support.operators import operator_arguments
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.common.argument_checks import check_int, check_number, shown

B, H, M, N, D = 2, 4, 5, 7, 8
STARTS, LENGTHS, TABLE = (
    torch.tensor([0, 2, M]),
    torch.tensor([3, 9]),
    torch.tensor([[0, 1], [2, 3]]),
)
Mask: Any = tk.Mask
Call = Callable[[Any], object]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def attention(**changes: Any) -> object:
    args = {"q": rand(B, H, M, D), "k": rand(B, H, N, D), "v": rand(B, H, N, D)}
    return tk.attention(**{**args, **changes})


def varlen(**changes: Any) -> object:
    args = {"q": rand(M, H, D), "k": rand(M, H, D), "v": rand(M, H, D), "cu_seqlens_q": STARTS}
    return tk.attention_varlen(**{**args, **changes})


def decode(**changes: Any) -> object:
    cache = {"k_cache": rand(4, H, 16, D), "v_cache": rand(4, H, 16, D)}
    args = {"q": rand(B, H, 1, D), **cache, "cache_seqlens": LENGTHS, "block_table": TABLE}
    return tk.attention_decode(**{**args, **changes})


def append(**changes: Any) -> object:
    cache = {"k_cache": rand(B, H, 16, D), "v_cache": rand(B, H, 16, D)}
    args = {**cache, "k": rand(B, H, 1, D), "v": rand(B, H, 1, D), "cache_seqlens": LENGTHS}
    tk.append_to_cache(**{**args, **changes})
    return None


TENSORS: dict[str, tuple[str, Call, Tensor]] = {
    "q": ("q", lambda x: attention(q=x), rand(B, H, M, D)),
    "k": ("k", lambda x: attention(k=x), rand(B, H, N, D)),
    "bias": ("bias", lambda x: attention(bias=x), rand(B, H, M, N)),
    "sinks": ("sinks", lambda x: attention(sinks=x), rand(H)),
    "seed": ("seed", lambda x: attention(seed=x, dropout_p=0.5), torch.tensor(3)),
    "slopes": ("slopes", lambda x: attention(bias=tk.alibi(x)), rand(H)),
    "table": ("table", lambda x: attention(relative=tk.relative_bias(x, lowest=0)), rand(H, 3)),
    "dense": ("attn_mask", lambda x: attention(mask=Mask.dense(x)), torch.ones(M, N).bool()),
    "blocks": ("blocks", lambda x: Mask.block_sparse(x, 4), torch.ones(2, 2).bool()),
    "lengths": ("key_lengths", lambda x: Mask.padding(x), LENGTHS),
    "end": ("end", lambda x: Mask.key_range(LENGTHS, x), LENGTHS),
    "ids": ("q_ids", lambda x: Mask.segments(x), torch.ones(B, M).long()),
    "packed": ("q", lambda x: varlen(q=x), rand(M, H, D)),
    "cu_seqlens": ("cu_seqlens_q", lambda x: varlen(cu_seqlens_q=x), STARTS),
    "cache": ("k_cache", lambda x: decode(k_cache=x), rand(4, H, 16, D)),
    "cache_seqlens": ("cache_seqlens", lambda x: decode(cache_seqlens=x), LENGTHS),
    "block_table": ("block_table", lambda x: decode(block_table=x), TABLE),
    "append-v": ("v", lambda x: append(v=x), rand(B, H, 1, D)),
}


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x) if x.dim() else [x])


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


KINDS: dict[str, Callable[[Tensor], object]] = {
    "nested": nested,
    "sparse": torch.Tensor.to_sparse,
    "csr": lambda x: x.reshape(-1, x.shape[-1] if x.dim() else 1).to_sparse_csr(),
    "quantized": quantized,
    "complex": lambda x: x.to(torch.complex64),
    "list": lambda x: [x],
    "array": lambda x: x.numpy(),
    "none-like": lambda x: NotImplemented,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argument", TENSORS)
def test_tensor_of_another_kind_raises_type_error(argument: str, kind: str) -> None:
    name, call, valid = TENSORS[argument]
    call(valid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its prototypes
        wrong = KINDS[kind](valid)
    with pytest.raises(TypeError, match=f"^{name} must be "):
        call(wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_autocast_does_not_cast_tensors_of_another_kind(name: str) -> None:
    wrong = rand(B, H, N, D).to_mkldnn()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=f"^{name} must be a strided tensor, got layout"),
    ):
        attention(**{name: wrong})


@pytest.mark.parametrize("x", [torch.ones(()), torch.ones(3)], ids=["0-d", "1-d"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_tensor_of_few_dimensions_raises(x: Tensor, name: str, needs_grad: bool) -> None:
    x = x.clone().requires_grad_(needs_grad)
    for mask in (None, Mask.causal(), Mask.padding(LENGTHS)):
        with pytest.raises(ValueError, match=rf"^{name} must be \(batch, heads, length, width\)"):
            attention(mask=mask, **{name: x})


@pytest.mark.parametrize("needs_grad", [False, True])
def test_outputs_too_large_to_allocate_do_not_hide_what_is_wrong(needs_grad: bool) -> None:
    q = rand(1, 1, 1, D).expand(1 << 50, 1, 1, D).requires_grad_(needs_grad)
    with pytest.raises(ValueError, match=r"^q, k and v must share the batch size"):
        attention(q=q)
    with pytest.raises(ValueError, match="q's heads must be a positive multiple of k_cache's"):
        decode(q=q.detach())


HUGE = 10**400
NUMBERS: list[tuple[str, Callable[[], object], str]] = [
    ("scale", lambda: attention(scale=HUGE), "scale must fit in a float, got an int of 1329 bits"),
    ("softcap", lambda: attention(softcap=HUGE), "softcap must fit in a float"),
    ("dropout_p", lambda: attention(dropout_p=-HUGE), "dropout_p must fit in a float"),
    ("seed", lambda: attention(seed=HUGE), "seed must be at most"),
    ("left", lambda: Mask.window(-(10**30), None), "left must be at least -9223372036854775808"),
    ("right", lambda: Mask.window(0, 1 << 63), "right must be at most 9223372036854775807"),
    ("block_size", lambda: Mask.block_sparse(torch.ones(1, 1).bool(), HUGE), "block_size must be"),
    ("max_q", lambda: varlen(max_seqlen_q=1 << 63), "max_seqlen_q must be at most 2147483647"),
    ("max_k", lambda: varlen(max_seqlen_k=1 << 31), "max_seqlen_k must be at most 2147483647"),
    ("heads", lambda: tk.alibi_slopes(HUGE), "heads must be at most"),
    ("negative", lambda: Mask.causal().materialize(1, 1, -1, 1), "M must be at least 0, got -1"),
    ("pairs", lambda: Mask.causal().materialize(1, 1, 1 << 40, 1 << 40), "M \\* N must fit in 64"),
    ("size", lambda: Mask.causal().show(HUGE), "M must be at most"),
    ("batch", lambda: Mask.causal().show(3, batch=-1), "batch must be at least 0, got -1"),
    ("no-batch", lambda: Mask.padding(LENGTHS[:0]).show(3), "must have a batch entry .* B = 0"),
    ("device", lambda: Mask.causal().materialize(1, 1, 1, 1, "gpu"), "device must be .* 'gpu'"),
    ("meta", lambda: Mask.padding(LENGTHS.to("meta")).to("cpu"), "end is on meta"),
    ("sequences", lambda: varlen(cu_seqlens_q=STARTS[:1].expand(1 << 40)), "fewer than 2\\^31"),
]


@each(("call", "message"), [pytest.param(*row, id=n) for n, *row in NUMBERS])
def test_value_out_of_range_raises_value_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("value", [torch.ones(3), "yes", 1, None])
def test_return_lse_must_be_a_bool(value: Any) -> None:
    for call in (attention, varlen, decode):
        with pytest.raises(TypeError, match="return_lse must be True or False, got"):
            call(return_lse=value)


@each(
    ("device", "error"),
    [(b"\xff", TypeError), (Tensor, TypeError), (True, TypeError), (-1, ValueError),
     (HUGE, ValueError), ("xla", ValueError), ("cuda:999", ValueError), (999, ValueError)],
)  # fmt: skip
def test_device_must_be_one_that_torch_can_use(device: Any, error: type[Exception]) -> None:
    for call in (Mask.causal().to, lambda x: Mask.causal().materialize(1, 1, 1, 1, x)):
        with pytest.raises(error, match=r"^device must be a torch device, got"):
            call(device)


@pytest.mark.parametrize("backend", [np.array(["cpu", "cpu"]), 3, None, b"cpu"])
def test_backend_must_be_a_name(backend: Any) -> None:
    def explain(backend: Any) -> object:
        return tk.explain(*rand(3, B, H, M, D), backend=backend)

    for call in (attention, varlen, decode, explain):
        with pytest.raises(ValueError, match=r"^backend must be one of 'auto', 'cpu', .*, got"):
            call(backend=backend)


def test_result_too_large_to_allocate() -> None:
    q, v = rand(1, 1, M, 1), rand(1, 1, 1, 1)
    for size in (1 << 45, 1 << 61):
        wide = v.expand(1, 1, 1, size)
        for x in (q, q.expand(1, 2, M, 1), rand(1, M, 2, 1).transpose(1, 2)):
            arguments = operator_arguments(x, v, wide)
            with pytest.raises(RuntimeError, match="cannot allocate memory for a result"):
                operators_of("cpu").attention_forward(**arguments)


@each("constraints", [3, "ab", [1], (Mask.causal(),), torch.ones(2)])
def test_mask_of_other_objects_raises(constraints: Any) -> None:
    with pytest.raises(TypeError, match="constraints must"):
        Mask(constraints)


def test_caches_that_cannot_be_written_raise() -> None:
    with torch.inference_mode():
        inference = rand(B, H, 16, D)
    for cache, message in (
        (rand(B, H, 16, D).requires_grad_(), "v_cache must not require grad"),
        (inference, "v_cache was made in inference mode"),
        (rand(B, H, 1, D).expand(B, H, 16, D), "v_cache must have memory for each"),
    ):
        with pytest.raises(ValueError, match=message):
            append(v_cache=cache)


@pytest.mark.parametrize("left", [-(1 << 63), -(1 << 62), 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_windows_of_any_64_bit_extent_are_exact(left: int, align: Any) -> None:
    mask = Mask.window(left, None, align=align)
    expected = torch.full((B, H, M, N), left > 0)
    assert torch.equal(mask.materialize(B, H, M, N), expected)
    q = rand(B, H, M, D)
    k = v = rand(B, H, N, D)
    for backend in ("cpu", "reference"):
        o = tk.attention(q, k, v, mask=mask, backend=backend)
        want = tk.attention(q, k, v, backend=backend) if left > 0 else torch.zeros_like(q)
        assert_same_function(o, want)


@pytest.mark.parametrize("block_size", [16, 10**12, (1 << 63) - 1])
def test_large_blocks_need_no_memory(block_size: int) -> None:
    for layout in (torch.ones(1, 1).bool(), torch.zeros(1, 1).bool()):
        mask = Mask.block_sparse(layout, block_size)
        assert torch.equal(mask.materialize(B, H, M, N), layout.expand(B, H, M, N))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint8, torch.int8])
def test_masks_take_integers_of_any_width(dtype: torch.dtype) -> None:
    ids = (torch.arange(M) // 2).expand(B, M)
    for mask, narrow in (
        (Mask.padding(LENGTHS), Mask.padding(LENGTHS.to(dtype))),
        (Mask.segments(ids), Mask.segments(ids.to(dtype))),
    ):
        assert torch.equal(mask.materialize(B, H, M, M), narrow.materialize(B, H, M, M))


def test_values_are_shown_shortly() -> None:
    assert shown(10**5000) == "an int of 16610 bits"
    assert shown(torch.ones(2, 3)) == "a tensor (2, 3)"
    assert len(shown([[["x" * 1000] * 100] * 100] * 100)) <= 100
    assert shown(-5) == "-5"


@pytest.mark.parametrize("value", [True, 1.0, "1", None, torch.tensor(1)])
def test_check_int_takes_ints_only(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^n must be an int, got"):
        check_int("n", value)


@pytest.mark.parametrize(
    ("value", "error"),
    [(HUGE, ValueError), (math.nan, ValueError), (1j, TypeError), (True, TypeError)],
)
def test_check_number_takes_finite_numbers_only(value: Any, error: type[Exception]) -> None:
    assert check_number("x", 1e-320) == 1e-320
    with pytest.raises(error, match=r"^x must"):
        check_number("x", value)
