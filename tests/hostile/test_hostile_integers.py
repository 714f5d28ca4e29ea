"""Integers far beyond every size: equal to the largest useful ones, without overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, NAMES, operators_of
from tests.support.operators import NOTHING_WANTED, operator_arguments
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.masks.constraints import Align

H, M, N, D = 2, 70, 90, 16
LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, H, M, D), torch.randn(1, H, N, D), torch.randn(1, H, N, D)


@pytest.mark.parametrize("block_size", [M + N, 1 << 31, 10**12, LARGEST])
@pytest.mark.parametrize("softcap", [None, 9.0], ids=["direct", "operator"])
def test_block_sizes(block_size: int, softcap: float | None, backend: str) -> None:
    q, k, v = qkv()
    layout = torch.tensor([True, False]).view(H, 1, 1)
    mask, same = tk.Mask.block_sparse(layout, block_size), tk.Mask.block_sparse(layout, 90)
    o, expected = (
        tk.attention(q, k, v, mask=one, softcap=softcap, backend=backend) for one in (mask, same)
    )
    assert torch.equal(o, expected)
    assert torch.equal(mask.materialize(1, H, M, N), same.materialize(1, H, M, N))
    both = tk.Mask.block_sparse(torch.ones(35, 45).bool(), 2) & mask
    assert torch.equal(tk.attention(q, k, v, mask=both, softcap=softcap, backend=backend), expected)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("softcap", [None, 9.0], ids=["direct", "operator"])
def test_windows(align: Align, softcap: float | None, backend: str) -> None:
    q, k, v = qkv()
    for left, right in ((SMALLEST, None), (None, SMALLEST), (LARGEST, LARGEST), (3, LARGEST)):
        near = (x if x is None else max(-M - N, min(x, M + N)) for x in (left, right))
        o, expected = (
            tk.attention(q, k, v, mask=mask, softcap=softcap, backend=backend)
            for mask in (
                tk.Mask.window(left, right, align=align),
                tk.Mask.window(*near, align=align),
            )
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
    q, k, v = (torch.randn(M, H, D, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 9, 9, 60])
    results = []
    for longest in (51, 2**31 - 1):
        o = tk.attention_varlen(
            q, k, v, starts, max_seqlen_q=longest, max_seqlen_k=longest, backend=backend
        )
        results.append((o, *torch.autograd.grad(o.sin().sum(), (q, k, v))))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


SLOPES = torch.ones(1, H)
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
        {"blocks": torch.ones(1, 1, 1).bool(), "block_size": 90},
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


def forward_of(backend: str) -> Any:
    if backend == "triton":
        return triton_operators.forward
    return operators_of(backend).attention_forward


def backward_of(backend: str) -> Any:
    if backend == "triton":
        return triton_operators.backward
    return operators_of(backend).attention_backward


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("backend", OPERATORS)
def test_operators(name: str, backend: str) -> None:
    """Compiled code calls the operators without the checks of Python."""
    q, k, v = qkv()
    found, expected = (
        forward_of(backend)(**operator_arguments(q, k, v, **options)) for options in EQUAL[name]
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("offset", [SMALLEST, LARGEST])
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_alibi_offset(offset: int, backend: str) -> None:
    arguments = operator_arguments(*qkv(), alibi_slopes=SLOPES, alibi_offset=offset)
    o, row_stats, _ = operators_of(backend).attention_forward(**arguments)
    assert o.isfinite().all()
    assert row_stats.isfinite().all()


@pytest.mark.parametrize("p", [-1.0, 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_dropout_probability(p: float, backend: str) -> None:
    arguments = operator_arguments(*qkv(), dropout_p=p, seed=torch.tensor(1))
    with pytest.raises(RuntimeError, match="dropout_p must be between 0 and 1"):
        operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_page_size(backend: str) -> None:
    """The capacity, page_size * max_pages, would be 2^64."""
    pages = torch.zeros(1).expand(1, 1, 1 << 62, 1)
    lengths, table = torch.tensor([0], dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    arguments = operator_arguments(
        torch.zeros(1, 1, 1, 1), pages, pages, cache_seqlens=lengths, block_table=table
    )
    with pytest.raises(RuntimeError, match="q and the caches do not fit together"):
        operators_of(backend).attention_forward(**arguments)


FAR = [-(1 << 31), -5, 0, 40, 71, 1 << 22, (1 << 31) - 1]


@pytest.mark.parametrize("side", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("backend", [name for name in OPERATORS if name != "cpu"])
def test_unchecked_offsets_stay_within_bounds(side: int, backend: str) -> None:
    """cu_seqlens on a GPU are not validated: kernels clamp them."""
    q, k, v = (torch.randn(1, H, M, D) for _ in range(3))
    plain = torch.tensor([0, 10, 20, 30, 40, 50, 60, 70], dtype=torch.int32)
    starts = [plain, plain]
    starts[side] = torch.tensor([0, *FAR], dtype=torch.int32)
    arguments = operator_arguments(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], bottom_right=True
    )
    o, row_stats, block_mask = forward_of(backend)(**arguments)
    assert o.isfinite().all()
    _, _, _, *options = arguments.values()
    saved = (q, None, q, k, v, o, row_stats, block_mask)
    grads = backward_of(backend)(*saved, *options, *NOTHING_WANTED)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("queries", [5, M])
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_operators_refuse_queries_without_heads(queries: int, backend: str) -> None:
    q, k, v = qkv()
    arguments = operator_arguments(q[:, :0, :queries], k, v)
    with pytest.raises(RuntimeError, match="fit together"):
        operators_of(backend).attention_forward(**arguments)
    lengths = torch.tensor([9], dtype=torch.int32)
    arguments = operator_arguments(q[:, :0, :1], k, v, cache_seqlens=lengths)
    with pytest.raises(RuntimeError, match="fit together"):
        operators_of(backend).attention_forward(**arguments)
