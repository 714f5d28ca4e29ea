"""Relative biases: the dense form, clamped distances, gradients; arguments of relative keys too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.threads import threads
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.relative import by_pair, distances

ALIGNS: tuple[Align, ...] = ("top_left", "bottom_right")
H, M, N, D = 2, 5, 7, 4

relative_bias: Any = tk.relative_bias
relative_keys: Any = tk.relative_keys


def qkv(H_kv: int = H) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, H, M, D), torch.randn(1, H_kv, N, D), torch.randn(1, H_kv, N, D)


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("M", "N"), [(3, 3), (2, 5), (5, 2), (1, 4), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("heads", [1, 2])
def test_dense_form(M: int, N: int, align: Align, heads: int) -> None:
    """Tables that are narrower and wider than the distances, and beyond them on each side."""
    d = N - M if align == "bottom_right" else 0
    for entries, lowest in ((1, 0), (3, -1), (20, -9), (4, 3), (4, -6), (2, 50), (2, -50)):
        table = torch.randn(heads, entries)
        bias = tk.relative_bias(table, lowest=lowest, align=align).dense(M, N)
        assert bias.shape == (1, heads, M, N)
        for h, i, j in ((h, i, j) for h in range(heads) for i in range(M) for j in range(N)):
            clamped = min(max(i + d - j, lowest), lowest + entries - 1)
            assert bias[0, h, i, j] == table[h, clamped - lowest]


@pytest.mark.parametrize("align", ALIGNS)
def test_table_of_every_distance(align: Align) -> None:
    lowest, count = distances(M, N, align)
    distance = torch.arange(lowest, lowest + count)
    table = by_pair(distance[None], M, N)
    d = N - M if align == "bottom_right" else 0
    assert torch.equal(table[0], torch.arange(M)[:, None] + d - torch.arange(N))


def test_a_table_of_all_distances_is_not_copied() -> None:
    table = torch.randn(H, 30)
    expanded = tk.relative_bias(table, lowest=-12).by_distance(M, N, torch.float32)
    assert expanded.data_ptr() == table[:, 6:].data_ptr()


@pytest.mark.parametrize("align", ALIGNS)
def test_equals_its_dense_form(align: Align, backend: str) -> None:
    q, k, v = torch.randn(2, 4, 67, 8), torch.randn(2, 2, 131, 8), torch.randn(2, 2, 131, 8)
    relative = tk.relative_bias(torch.randn(4, 33), lowest=-20, align=align)
    inside = tk.attention(q, k, v, relative=relative, backend=backend)
    outside = tk.attention(q, k, v, bias=relative.dense(67, 131), backend=backend)
    assert_same_function(inside, outside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_the_table(dtype: torch.dtype, backend: str) -> None:
    """The kernels read it as float32; its gradient has its own dtype."""
    q, k, v = qkv()
    table = torch.tensor([[0.5, 0.25, -1.0]]).to(dtype).requires_grad_()
    full = table.detach().float().requires_grad_()
    o, expected = (
        tk.attention(q, k, v, relative=tk.relative_bias(x, lowest=-1), backend=backend)
        for x in (table, full)
    )
    assert torch.equal(o, expected)
    (gradient,) = torch.autograd.grad(o.square().sum(), table)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), full)
    assert torch.equal(gradient, expected_gradient.to(dtype))


def test_alibi_as_a_table(backend: str) -> None:
    q, k, v = qkv()
    slopes = tk.alibi_slopes(H)
    table = -slopes[:, None] * torch.arange(-N, M + 1).abs()
    assert_same_function(
        tk.attention(q, k, v, relative=tk.relative_bias(table, lowest=-N), backend=backend),
        tk.attention(q, k, v, bias=tk.alibi(slopes), backend=backend),
    )


def test_gradient_of_the_table_alone(backend: str) -> None:
    """All heads share the table, and distances lie beyond both of its ends."""
    q, k, v = qkv(H_kv=1)
    table = torch.randn(1, 3, requires_grad=True)
    relative = tk.relative_bias(table, lowest=-1, align="bottom_right")
    o = tk.attention(q, k, v, relative=relative, backend=backend)
    (inside,) = torch.autograd.grad(o.square().sum(), table)
    o = tk.attention(q, k, v, bias=relative.dense(M, N), backend="reference")
    (outside,) = torch.autograd.grad(o.square().sum(), table)
    assert_same_function(inside, outside)
    assert inside.abs().min() > 0


def test_gradient_with_hidden_nan(backend: str) -> None:
    q, k, v = qkv()
    k[:, :, 5:], v[:, :, 5:] = float("nan"), float("nan")
    table = torch.zeros(H, 9, requires_grad=True)
    o = tk.attention(
        q, k, v, relative=tk.relative_bias(table, lowest=-4), backend=backend,
        mask=tk.Mask.padding(torch.tensor([5])),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(o.sum(), table)
    assert gradient.isfinite().all()


ONES, KEYS = torch.ones(H, 3), torch.ones(H, 3, D)
INVALID: dict[str, tuple[Any, type[Exception], str]] = {
    "list": (lambda: relative_bias([[0.5]], lowest=0), TypeError, "table must be .*, got list"),
    "ints": (lambda: relative_bias(ONES.long(), lowest=0), TypeError, "table must be a floating"),
    "1d": (lambda: relative_bias(ONES[0], lowest=0), ValueError, r"E >= 1, got shape \(3,\)"),
    "3d": (lambda: relative_bias(ONES[None], lowest=0), ValueError, r"got shape \(1, 2, 3\)"),
    "no-entries": (lambda: relative_bias(ONES[:, :0], lowest=0), ValueError, r"shape \(2, 0\)"),
    "lowest": (lambda: relative_bias(ONES, lowest=0.5), TypeError, "lowest must be an int, got"),
    "bool": (lambda: relative_bias(ONES, lowest=True), TypeError, "lowest must be an int, got"),
    "huge": (lambda: relative_bias(ONES, lowest=1 << 31), ValueError, "lowest must be at most"),
    "align": (lambda: relative_bias(ONES, lowest=0, align="end"), ValueError, "got 'end'"),
    "keys-list": (
        lambda: relative_keys([[[0.5]]], lowest=0),
        TypeError,
        "keys must be .* got list",
    ),
    "keys-ints": (
        lambda: relative_keys(KEYS.int(), lowest=0),
        TypeError,
        "keys must be a floating",
    ),
    "keys-2d": (
        lambda: relative_keys(ONES, lowest=0),
        ValueError,
        r"keys must be \(H_q or 1, E, D\) with E >= 1, got shape \(2, 3\)",
    ),
    "keys-4d": (lambda: relative_keys(KEYS[None], lowest=0), ValueError, r"shape \(1, 2, 3, 4\)"),
    "keys-no-entries": (
        lambda: relative_keys(KEYS[:, :0], lowest=0),
        ValueError,
        r"got shape \(2, 0, 4\)",
    ),
    "keys-no-heads": (
        lambda: relative_keys(KEYS[:0], lowest=0),
        ValueError,
        r"got shape \(0, 3, 4\)",
    ),
    "keys-lowest": (lambda: relative_keys(KEYS, lowest=1.0), TypeError, "lowest must be an int"),
    "keys-huge": (
        lambda: relative_keys(KEYS, lowest=-1 << 31),
        ValueError,
        "lowest must be at least",
    ),
    "keys-align": (lambda: relative_keys(KEYS, lowest=0, align=0), ValueError, "align .* got 0"),
    "keys-table": (
        lambda: relative_keys(KEYS, table=ONES[:, :2], lowest=0),
        ValueError,
        r"table must have the 3 distances of keys, got shape \(2, 2\)",
    ),
    "keys-table-1d": (
        lambda: relative_keys(KEYS, table=ONES[0], lowest=0),
        ValueError,
        r"table must be \(H_q or 1, E\) with E >= 1, got shape \(3,\)",
    ),
    "keys-table-ints": (
        lambda: relative_keys(KEYS, table=ONES.long(), lowest=0),
        TypeError,
        "table must be a floating",
    ),
}


@each("name", INVALID)
def test_invalid_tables_raise(name: str) -> None:
    make, error, message = INVALID[name]
    with pytest.raises(error, match=message):
        make()


ARGUMENTS: dict[str, tuple[Any, type[Exception], str]] = {
    "tensor": (
        ONES,
        TypeError,
        r"relative must be relative_bias\(table\), relative_keys\(keys\) or None, got a tensor",
    ),
    "alibi": (tk.alibi(torch.ones(H)), TypeError, "relative must be .*, got Alibi"),
    "heads": (
        relative_bias(torch.ones(3, 3), lowest=0),
        ValueError,
        r"the table of relative must be \(H_q or 1, E\) with H_q = 2, got shape \(3, 3\)",
    ),
    "device": (
        relative_bias(ONES.to("meta"), lowest=0),
        ValueError,
        "the table of relative is on meta, q is on cpu",
    ),
    "keys-heads": (
        relative_keys(torch.ones(3, 3, D), lowest=0),
        ValueError,
        r"the keys of relative must be \(H_q or 1, E, D\) with H_q = 2 and D = 4, "
        r"got shape \(3, 3, 4\)",
    ),
    "keys-width": (
        relative_keys(torch.ones(H, 3, D + 1), lowest=0),
        ValueError,
        r"with H_q = 2 and D = 4, got shape \(2, 3, 5\)",
    ),
    "keys-device": (
        relative_keys(KEYS.to("meta"), lowest=0),
        ValueError,
        "the keys of relative are on meta, q is on cpu",
    ),
    "keys-table-heads": (
        relative_keys(KEYS, table=torch.ones(3, 3), lowest=0),
        ValueError,
        r"the table of relative must be \(H_q or 1, E\) with H_q = 2, got shape \(3, 3\)",
    ),
}


@each("name", ARGUMENTS)
def test_invalid_arguments_raise(name: str) -> None:
    relative, error, message = ARGUMENTS[name]
    starts, lengths = torch.tensor([0, M]), torch.tensor([N])
    q, k, v = qkv()
    with pytest.raises(error, match=message):
        tk.attention(q, k, v, relative=relative)
    packed = [x[0, :, :M].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(error, match=message):
        tk.attention_varlen(packed[0], packed[1], packed[2], starts, relative=relative)
    if isinstance(relative, tk.RelativeBias | tk.RelativeKeys):
        relative = dataclasses.replace(relative, align="bottom_right")
    with pytest.raises(error, match=message):
        tk.attention_decode(q, k, v, lengths, relative=relative)


MAKERS = {"table": (relative_bias, ONES), "keys": (relative_keys, KEYS)}


@pytest.mark.parametrize("kind", MAKERS)
def test_packed_sequences_have_one_align(kind: str) -> None:
    x, starts = torch.randn(M, H, D), torch.tensor([0, M])
    make, entries = MAKERS[kind]
    top, bottom = (make(entries, lowest=0, align=align) for align in ALIGNS)
    slopes = tk.alibi(torch.ones(H))
    message = "{} and relative must have the same align for packed sequences, got 'top_left' and"
    with pytest.raises(ValueError, match=message.format("mask")):
        tk.attention_varlen(x, x, x, starts, mask=tk.Mask.causal(), relative=bottom)
    with pytest.raises(ValueError, match=message.format("bias")):
        tk.attention_varlen(x, x, x, starts, bias=slopes, relative=bottom)
    tk.attention_varlen(x, x, x, starts, mask=tk.Mask.causal(), bias=slopes, relative=top)


@pytest.mark.parametrize("kind", MAKERS)
def test_caches_grow_at_the_end(kind: str) -> None:
    q, k, v = qkv()
    make, entries = MAKERS[kind]
    with pytest.raises(ValueError, match="relative must have align='bottom_right' for decoding"):
        tk.attention_decode(q, k, v, torch.tensor([N]), relative=make(entries, lowest=0))
    relative = make(entries.clone().requires_grad_(), lowest=0, align="bottom_right")
    with pytest.raises(ValueError, match="relative must not require grad"):
        tk.attention_decode(q, k, v, torch.tensor([N]), relative=relative)
    o = tk.attention_decode(q, k, v, torch.tensor([N]), relative=relative, backend="reference")
    assert o.requires_grad


@pytest.mark.parametrize("count", [1, 3])
def test_gradient_on_several_threads(count: int) -> None:
    """One head: its keys are split among the threads."""
    q, k, v = (torch.randn(1, 1, 300, D) for _ in range(3))
    table = torch.randn(1, 600, requires_grad=True)
    gradients: list[torch.Tensor] = []
    for backend in ("cpu", "reference"):
        with threads(count):
            relative = tk.relative_bias(table, lowest=-300)
            o = tk.attention(q, k, v, relative=relative, backend=backend)
            gradients += torch.autograd.grad(o.square().sum(), table)
    assert_same_function(*gradients)
