"""Values out of range: integers far beyond every size, bools of any byte, and arguments of the
operators, which compiled code calls without the checks of Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, DECODERS, NAMES, operators_of
from tests.support.linear import linear_arguments
from tests.support.operators import (
    NOTHING_WANTED,
    assert_offsets_are_clamped,
    operator_arguments,
)
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align

H, M, N, D = 2, 70, 134, 16
LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)


def qkv(B: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)


# Integers are equal to the largest useful ones, without overflow.


@pytest.mark.parametrize("block_size", [M + N, 1 << 31, 10**12, LARGEST])
@pytest.mark.parametrize("softcap", [None, 9.0], ids=["direct", "operator"])
def test_block_sizes(block_size: int, softcap: float | None, backend: str) -> None:
    q, k, v = qkv()
    layout = torch.tensor([True, False]).view(H, 1, 1)
    mask, same = tk.Mask.block_sparse(layout, block_size), tk.Mask.block_sparse(layout, N)
    o, expected = (
        tk.attention(q, k, v, mask=one, softcap=softcap, backend=backend) for one in (mask, same)
    )
    assert torch.equal(o, expected)
    assert torch.equal(mask.materialize(1, H, M, N), same.materialize(1, H, M, N))
    both = tk.Mask.block_sparse(torch.ones(M // 2, N // 2).bool(), 2) & mask
    assert torch.equal(tk.attention(q, k, v, mask=both, softcap=softcap, backend=backend), expected)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("softcap", [None, 9.0], ids=["direct", "operator"])
def test_windows(align: Align, softcap: float | None, backend: str) -> None:
    q, k, v = qkv()
    for left, right in ((SMALLEST, None), (None, SMALLEST), (LARGEST, LARGEST), (3, LARGEST)):
        near = (x if x is None else max(-M - N, min(x, M + N)) for x in (left, right))
        masks = tk.Mask.window(left, right, align=align), tk.Mask.window(*near, align=align)
        o, expected = (
            tk.attention(q, k, v, mask=mask, softcap=softcap, backend=backend) for mask in masks
        )
        assert torch.equal(o, expected)


@pytest.mark.parametrize(("start", "end"), [(LARGEST, N), (0, SMALLEST), (LARGEST, SMALLEST)])
@pytest.mark.parametrize("queries", [5, M])
def test_empty_key_ranges(queries: int, start: int, end: int, backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    mask = tk.Mask.key_range(torch.tensor([start]), torch.tensor([end]))
    o = tk.attention(q[:, :, :queries], k, v, mask=mask, backend=backend)
    for x in (o, *torch.autograd.grad(o.sum(), (q, k, v))):
        assert not x.any()


def test_max_seqlen(backend: str) -> None:
    """Any upper bound gives the same function. Bits are equal, except in the reference backend with
    one thread, where torch's products of other shapes round differently."""
    q, k, v = (torch.randn(M, H, D, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 9, 9, 60])
    results = []
    for longest in (51, 2**31 - 1):
        o = tk.attention_varlen(
            q, k, v, starts, max_seqlen_q=longest, max_seqlen_k=longest, backend=backend
        )
        results.append((o, *torch.autograd.grad(o.sin().sum(), (q, k, v))))
    assert_same_function(*results)
    if backend != "reference":
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# Any byte of a bool tensor but 0 is True, as in torch.


def as_bytes(visible: Tensor) -> Tensor:
    """The same bool tensor, with various bytes for True; the same strides."""
    n = torch.arange(visible.numel()).view(visible.shape) * 5 % 8
    true = torch.tensor([1, 2, 3, 64, 127, 128, 254, 255], dtype=torch.uint8)
    odd = torch.empty_like(visible, dtype=torch.uint8).copy_(true[n] * visible)
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
    "elements": blocky(2, H, M, N),
    "everything": torch.ones(1, 1, M, N, dtype=torch.bool),
    "keys": visible(2, 1, 1, N),
    "queries": visible(1, H, M, 1),
    "transposed": visible(1, 1, N, M).mT,
    "every-third": visible(M, N * 3)[None, None, :, ::3],
}
BLOCKS_16, BLOCKS_100 = visible(H, 5, 9), visible(1, 1, 2)
BOOL_MASKS: dict[str, list[tuple[Tensor, int | None]]] = {
    **{name: [(x, None)] for name, x in DENSE.items()},
    "blocks-16": [(BLOCKS_16, 16)],
    "blocks-100": [(BLOCKS_100, 100)],
    "conjunction": [
        (DENSE["elements"], None), (DENSE["keys"], None), (BLOCKS_16, 16), (BLOCKS_100, 100),
    ],
}  # fmt: skip
"""Bool tensors, and the block size of those that are layouts."""


def bool_mask(name: str, as_bool: Callable[[Tensor], Tensor]) -> tk.Mask:
    mask = tk.Mask()
    for x, size in BOOL_MASKS[name]:
        bools = as_bool(x)
        mask &= tk.Mask.dense(bools) if size is None else tk.Mask.block_sparse(bools, size)
    return mask


@pytest.mark.quick
@pytest.mark.parametrize("name", BOOL_MASKS)
def test_bytes_of_masks(name: str, backend: str) -> None:
    """Outputs and gradients are equal to the bit."""
    if name in DENSE and name != "every-third":
        assert as_bytes(DENSE[name]).stride() == DENSE[name].stride()
    q, k, v = (x.requires_grad_() for x in qkv(2))
    softcap = 9.0 if name == "conjunction" else None
    found = []
    for as_bool in (as_bytes, lambda x: x):
        mask = bool_mask(name, as_bool)
        o = tk.attention(q, k, v, mask=mask, softcap=softcap, backend=backend)
        grads = torch.autograd.grad(o.sin().sum(), (q, k, v))
        found.append((o, *grads, mask.materialize(2, H, M, N)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_bytes_of_masks_of_the_drop_in() -> None:
    q, k, v = qkv(2)
    for mask in (as_bytes(DENSE["elements"]), as_bytes(DENSE["transposed"])[0, 0]):
        want = functional.scaled_dot_product_attention(q, k, v, mask)
        assert_same_function(tk.scaled_dot_product_attention(q, k, v, mask), want)
        with tk.enabled():
            o = functional.scaled_dot_product_attention(q, k, v, mask)
        assert_same_function(o, want)


# Operators: integers.


IDS = torch.tensor([[[[SMALLEST, LARGEST] * (N // 2)]]])
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unbounded": ({"diagonal_low": SMALLEST, "diagonal_high": LARGEST}, {}),
    "empty": (
        {"diagonal_low": LARGEST, "diagonal_high": SMALLEST},
        {"diagonal_low": N, "diagonal_high": -M},
    ),
    "right": ({"diagonal_low": LARGEST}, {"diagonal_low": N}),
    "left": ({"diagonal_high": SMALLEST}, {"diagonal_high": -M}),
    "blocks": (
        {"blocks": torch.ones(1, 1, 1).bool(), "block_size": LARGEST},
        {"blocks": torch.ones(1, 1, 1).bool(), "block_size": N},
    ),
    "key-range": (
        {"key_start": torch.tensor([SMALLEST]), "key_end": torch.tensor([LARGEST])},
        {},
    ),
    "no-keys": (
        {"key_start": torch.tensor([LARGEST]), "key_end": torch.tensor([SMALLEST])},
        {"key_end": torch.tensor([0])},
    ),
    "segments": (
        {"q_low": IDS[..., :M], "q_high": IDS[..., :M], "k_position": IDS},
        {"q_low": IDS[..., :M] % 2, "q_high": IDS[..., :M] % 2, "k_position": IDS % 2},
    ),
}
OPERATORS = [name for name in NAMES if name != "reference"]
each_compiled = pytest.mark.parametrize("backend", COMPILED_BACKENDS)


def operators(backend: str) -> tuple[Any, Any]:
    """Operators of the forward and the backward pass."""
    if backend == "triton":
        return triton_operators.forward, triton_operators.backward
    namespace = operators_of(backend)
    return namespace.attention_forward, namespace.attention_backward


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("backend", OPERATORS)
def test_integers_of_operators(name: str, backend: str) -> None:
    (q, k, v), (forward, _) = qkv(), operators(backend)
    found, expected = (forward(**operator_arguments(q, k, v, **options)) for options in EQUAL[name])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("offset", [SMALLEST, LARGEST])
@each_compiled
def test_alibi_offset(offset: int, backend: str) -> None:
    slopes = torch.ones(1, H)
    arguments = operator_arguments(*qkv(), alibi_slopes=slopes, alibi_offset=offset)
    o, row_stats, _ = operators_of(backend).attention_forward(**arguments)
    assert o.isfinite().all()
    assert row_stats.isfinite().all()


@pytest.mark.parametrize("side", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("backend", [name for name in OPERATORS if name != "cpu"])
def test_unchecked_offsets_stay_within_bounds(side: int, backend: str) -> None:
    """cu_seqlens on a GPU are not validated: kernels clamp them."""
    assert_offsets_are_clamped(*operators(backend), torch.randn(1, H, M, D), side)


# Operators: arguments that are refused.


def packed(starts_q: Any, starts_k: Any, **options: Any) -> dict[str, Any]:
    """Arguments of an operator for packed sequences."""
    q, k, v = (torch.randn(1, H, M, D) for _ in range(3))
    return operator_arguments(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options)


B, H_q, PAGE = 3, 4, 16
LENGTHS = torch.tensor([70, 1, 16], dtype=torch.int32)
TABLE = torch.tensor(
    [[7, 0, 3, 8, 1], [2, 9, 9, 9, 9], [5, -1, -1, -1, -1]], dtype=torch.int32
)  # fmt: skip


def paged() -> dict[str, Any]:
    """Arguments of an operator for two queries of each sequence, and pages of keys and values."""
    q, k, v = (torch.randn(shape) for shape in ((B, H_q, 2, D), *[(9, H, PAGE, D)] * 2))
    return operator_arguments(
        q, k, v, cache_seqlens=LENGTHS, block_table=TABLE, scale=0.25, diagonal_high=0,
        bottom_right=True,
    )  # fmt: skip


SEED = {"dropout_p": 0.4, "seed": torch.tensor(1)}
DENSE_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"dropout_p": p, "seed": torch.tensor(1)}, "dropout_p must be between 0 and 1")
        for p in (-1.0, 1.5, float("nan"), float("inf"))
    ),
    (SEED | {"dropout_column": 24}, "dropout_column must be a multiple of 16, got 24"),
    (SEED | {"dropout_row": 8}, "dropout_row must be a multiple of 16, got 8"),
    (SEED | {"dropout_column": -64}, r"dropout_column must be between 0 and 2\^31 - 1, got -64"),
    (SEED | {"dropout_row": -1}, r"dropout_row must be between 0 and 2\^31 - 1, got -1"),
    (SEED | {"dropout_head": 2**31}, "dropout_head must be between 0 and .*, got 2147483648"),
]
CACHE_VALUES: list[tuple[str, Tensor]] = [
    ("cache_seqlens", torch.tensor([81, 1, 1], dtype=torch.int32)),
    ("cache_seqlens", torch.tensor([-1, 1, 1], dtype=torch.int32)),
    ("block_table", torch.tensor([[7, 0, 3, 8, 9]] * 3, dtype=torch.int32)),
    ("block_table", torch.tensor([[7, 0, -3, 8, 1]] * 3, dtype=torch.int32)),
]
CACHE_FORMS: list[tuple[str, Tensor | None]] = [
    ("cache_seqlens", LENGTHS.float()),
    ("cache_seqlens", LENGTHS[:2]),
    ("cache_seqlens", LENGTHS[None]),
    ("block_table", torch.zeros(2, 5, dtype=torch.int32)),
    ("block_table", torch.zeros(3, 5)),
    ("block_table", None),
    ("v", torch.randn(8, H, PAGE, D)),
    ("v", torch.randn(9, H, PAGE + 1, D)),
    ("k", torch.randn(9, 3, PAGE, D)),
    ("k", torch.randn(9, H, 0, D)),
    ("q", torch.randn(B, H_q, 1, D + 1)),
    ("q", torch.randn(B, H_q, 1, D).double()),
    ("q", torch.randn(B, 0, 1, D)),
    ("alibi_slopes", torch.ones(1, H_q + 1)),
    ("alibi_slopes", torch.ones(2, H_q)),
    ("alibi_slopes", torch.ones(H_q)),
    ("key_start", torch.ones(2).long()),
    ("key_end", torch.ones(B, 1).long()),
    ("key_end", torch.ones(B).int()),
]


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments of the operator, and the expected message."""
    for wrong, message in DENSE_ARGUMENTS:
        yield operator_arguments(*qkv()) | wrong, message
    q, k, v = qkv()
    yield operator_arguments(q[:, :0, :5], k, v), "fit together"
    yield operator_arguments(q[:, :0], k, v), "fit together"
    yield operator_arguments(q[:, :0, :1], k, v, cache_seqlens=LENGTHS[2:]), "fit together"
    starts = torch.tensor([0, 3], dtype=torch.int32)
    yield packed(starts, starts, dropout_row=1), "dropout_row is not supported in a varlen call"
    for name, x in CACHE_FORMS:
        yield paged() | {name: x}, r"cache_seqlens|table|cache|slopes|key_start|key_end"
    # The capacity, page_size * max_pages, would be 2^64.
    pages, table = torch.zeros(1).expand(1, 1, 1 << 62, 1), torch.zeros(1, 4, dtype=torch.int32)
    huge = {"q": pages[:, :, :1], "k": pages, "v": pages, "block_table": table}
    huge["cache_seqlens"] = LENGTHS[:1] * 0
    yield paged() | huge, "q and the caches do not fit together"


@each_compiled
def test_operators_refuse_arguments(backend: str, subtests: pytest.Subtests) -> None:
    for n, (arguments, message) in enumerate(refused()):
        with subtests.test(f"{n}: {message}"), pytest.raises(RuntimeError, match=message):
            operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize(("name", "wrong"), CACHE_VALUES)
def test_values_of_caches_are_checked_on_a_cpu(name: str, wrong: Tensor) -> None:
    message = "cache_seqlens must be within the capacity, and block_table must"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.transformer_kernels.attention_forward(**paged() | {name: wrong})


@pytest.mark.parametrize("backend", [x for x in DECODERS if x.values[0] in ("cuda", "triton")])
@pytest.mark.parametrize(("name", "wrong"), CACHE_VALUES)
def test_values_of_caches_are_tolerated_on_a_gpu(name: str, wrong: Tensor, backend: str) -> None:
    """A GPU clamps the lengths, and reads missing pages as zeros."""
    arguments = paged() | {name: wrong}
    k, v, table = arguments["k"], arguments["v"], arguments["block_table"]
    there = k.clone()
    right = arguments | {
        "k": torch.cat([k, torch.zeros_like(k[:1])]),
        "v": torch.cat([v, torch.zeros_like(v[:1])]),
        "cache_seqlens": arguments["cache_seqlens"].clamp(0, 80),
        "block_table": torch.where((table < 0) | (table > 8), 9, table),
    }
    found = operators(backend)[0](**arguments)
    expected = torch.ops.transformer_kernels.attention_forward(**right)
    assert_same_function(found[:2], expected[:2])
    assert torch.equal(k, there)


@pytest.mark.parametrize(
    "starts",
    [
        torch.tensor([1, 5, 40, 70, 70]),
        torch.tensor([0, 5, 4, 40, 70]),
        torch.tensor([0, 5, 40, 70, 71]),
        torch.tensor([0, -5, 40, 70, 70]),
        torch.tensor([0, 5, 40, 70]),
        torch.tensor([[0, 5, 5, 40, 70]]),
        torch.tensor([0.0, 5, 40, 70, 70]),
        torch.tensor([]),
        None,
    ],
    ids=["start", "falls", "long", "negative", "count", "2d", "float", "empty", "none"],
)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_are_checked_on_a_cpu(name: str, starts: Tensor | None) -> None:
    forward, backward = operators("cpu")
    good = torch.tensor([0, 5, 5, 40, 70], dtype=torch.int32)
    arguments = packed(good, good)
    o, row_stats, block_mask = forward(**arguments)
    if starts is not None and not (starts.is_floating_point() and len(starts)):
        starts = starts.int()
    q, k, v, *rest = (arguments | {name: starts}).values()
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        forward(q, k, v, *rest)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        backward(o, None, q, k, v, o, row_stats, block_mask, *rest, *NOTHING_WANTED)


LINEAR: list[tuple[dict[str, Any], str]] = [
    ({"k": torch.zeros(2, 2, 71, 8)}, "v has the wrong shape"),
    ({"v": torch.zeros(2, 2, 70, 8).double()}, "v has the wrong dtype"),
    ({"q": torch.zeros(2, 70, 8)}, "q, k and v must have four dimensions"),
    ({"log_decay": torch.zeros(2, 2, 69)}, "log_decay has the wrong shape"),
    ({"S": torch.zeros(2, 2, 8, 8)}, "S and z must be given together"),
    ({"key_end": torch.zeros(3, dtype=torch.int64)}, "key_end has the wrong shape"),
    ({"cu_seqlens": torch.tensor([0, 70]).int()}, "packed sequences have one batch entry"),
    ({"feature_map": 3}, "feature_map must be 0, 1 or 2"),
    ({"eps": 0.0}, "eps must be greater than 0"),
    ({"log_decay": torch.zeros(2, 2, 70), "causal": False}, "log_decay requires causal"),
    *(
        (
            {"cu_seqlens": torch.tensor(starts).int()}
            | dict.fromkeys("qkv", torch.zeros(1, 2, 70, 8)),
            "cu_seqlens must start at 0, not decrease",
        )
        for starts in ([0, 71], [0, 9, 5], [-1, 5])
    ),
]


def test_linear_operators_refuse_arguments(subtests: pytest.Subtests) -> None:
    q, k, v = (torch.randn(2, 2, 70, 8) for _ in range(3))
    for change, message in LINEAR:
        arguments = linear_arguments(q, k, v) | change
        with subtests.test(message), pytest.raises(RuntimeError, match=message):
            torch.ops.transformer_kernels.linear_forward(**arguments)


CONV: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(5, 9)}, "x must have three dimensions"),
    ({"x": torch.zeros(1, 5, 9).int()}, "x must be float16, bfloat16, float32 or float64"),
    ({"weight": torch.zeros(5, 9)}, "weight must have 2 to 8 columns"),
    ({"weight": torch.zeros(4, 4)}, "weight has the wrong shape"),
    ({"weight": torch.zeros(5, 4).int()}, "weight must be float16"),
    ({"bias": torch.zeros(4)}, "bias has the wrong shape"),
    ({"bias": torch.zeros(5).double()}, "bias has the wrong dtype"),
    ({"state": torch.zeros(2, 5, 3)}, "state has the wrong shape"),
    ({"state": torch.zeros(1, 5, 3).half()}, "state has the wrong dtype"),
    ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens has the wrong dtype"),
    ({"cu_seqlens": torch.tensor([[0, 9]]).int()}, "packed sequences have one batch entry"),
    *(
        ({"cu_seqlens": torch.tensor(starts).int()}, "cu_seqlens must start at 0, not decrease")
        for starts in ([0, 10], [0, 6, 5], [-1, 5])
    ),
]


def test_conv_operators_refuse_arguments(subtests: pytest.Subtests) -> None:
    forward = torch.ops.transformer_kernels.conv_forward
    x, weight = torch.randn(1, 5, 9), torch.randn(5, 4)
    valid = {
        "x": x,
        "weight": weight,
        "bias": None,
        "state": None,
        "cu_seqlens": None,
        "silu": True,
    }
    for change, message in CONV:
        with subtests.test(message), pytest.raises(RuntimeError, match=message):
            forward(**valid | change)
    backward = torch.ops.transformer_kernels.conv_backward
    for d_y, message in ((x[:, :, :8], "wrong shape"), (x.double(), "wrong dtype")):
        with subtests.test(message), pytest.raises(RuntimeError, match=f"d_y has the {message}"):
            backward(d_y, None, *valid.values())
