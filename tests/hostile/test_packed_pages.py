"""Operators that get packed sequences with keys in pages: refused, or read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hostile.test_memory import flipped
from tests.support.backends import COMPILED_BACKENDS, NAMES, operators_of
from tests.support.operators import NOTHING_WANTED, operator_arguments
from transformer_kernels.bench.tolerance import assert_same_function

OPERATORS = torch.ops.transformer_kernels
TABLE = torch.tensor([[7, 0, 3, 8, 1], [2, 9, 9, 9, 9], [5, -1, -1, -1, -1]]).int()


def arguments(**changed: Tensor) -> dict[str, Any]:
    """Of the forward operator, for three sequences of two queries."""
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(9, 2, 16, 8), torch.randn(9, 2, 16, 8)
    starts_q, starts_k = (torch.tensor(x).int() for x in ([0, 2, 4, 6], [0, 70, 71, 87]))
    return operator_arguments(
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=2, max_seqlen_k=70,
        block_table=TABLE,
    ) | changed  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_table", TABLE[:2]),
        ("block_table", TABLE[0]),
        ("v", torch.randn(8, 2, 16, 8)),
        ("q", torch.randn(2, 4, 6, 8)),
    ],
)
def test_forms(name: str, wrong: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"block_table must be|fit together|one batch entry"):
        OPERATORS.attention_forward(**arguments(**{name: wrong}))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_table", torch.where(TABLE == 8, 9, TABLE)),
        ("block_table", torch.where(TABLE == 3, -1, TABLE)),
        ("block_table", TABLE[:, :4]),
        ("block_table", TABLE[:, :0]),
        ("cu_seqlens_k", torch.tensor([0, 81, 81, 81]).int()),
    ],
)
def test_values(name: str, wrong: Tensor) -> None:
    OPERATORS.attention_forward(**arguments())
    with pytest.raises(RuntimeError, match="block_table must hold existing pages for all keys"):
        OPERATORS.attention_forward(**arguments(**{name: wrong}))


@pytest.mark.exhaustive
@pytest.mark.skipif("triton" not in NAMES, reason="Triton is not interpreted")
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("block_table", torch.where(TABLE == 8, 10, TABLE), torch.where(TABLE == 8, 9, TABLE)),
        ("block_table", torch.where(TABLE == 3, -1, TABLE), torch.where(TABLE == 3, 9, TABLE)),
        ("cu_seqlens_k", torch.tensor([0, 99, 99, 99]).int(), torch.tensor([0, 80, 80, 80]).int()),
    ],
)
def test_values_are_tolerated_on_a_gpu(name: str, wrong: Tensor, right: Tensor) -> None:
    """Triton reads missing pages as zeros, and no key past the block table."""
    given = arguments(**{name: wrong}) | {"max_seqlen_k": 99}
    zeros = {x: torch.cat([given[x], torch.zeros_like(given[x][:1])]) for x in "kv"}
    found = OPERATORS.triton_forward(**given)
    expected = OPERATORS.attention_forward(**given | zeros | {name: right})
    assert_same_function(found[:2], expected[:2])


def test_no_derivative() -> None:
    given = arguments()
    o, row_stats, _ = OPERATORS.attention_forward(**given)
    q, k, v, *options = given.values()
    with pytest.raises(RuntimeError, match="caches and pages have no backward pass"):
        OPERATORS.attention_backward(
            o, None, q, k, v, o, row_stats, None, *options, *NOTHING_WANTED
        )
    with pytest.raises(NotImplementedError, match="a cache or pages has no derivative"):
        OPERATORS.attention_forward(**given | {"q": q.requires_grad_()})


@pytest.mark.parametrize("backend", [name for name in COMPILED_BACKENDS if name != "cpu"])
def test_no_cuda_kernel(backend: str) -> None:
    with pytest.raises(RuntimeError, match="block_table is not supported in a varlen call"):
        operators_of(backend).attention_forward(**arguments())


def test_pages_are_read_once() -> None:
    B = 256
    q, pages = torch.randn(1, 1, B, 8), torch.randn(64, 1, 16, 8)
    table, starts = torch.zeros(B, 8).int(), torch.arange(B + 1).int()
    given = operator_arguments(
        q, pages, pages, cu_seqlens_q=starts, cu_seqlens_k=128 * starts, block_table=table,
        max_seqlen_q=1, max_seqlen_k=128,
    )  # fmt: skip
    expected, _, _ = OPERATORS.attention_forward(**given)
    with flipped(table, table + (1 << 22)):
        for _ in range(50):
            try:
                o, _, _ = OPERATORS.attention_forward(**given)
            except RuntimeError as error:
                assert "block_table must hold" in str(error)  # noqa: PT017
            else:
                assert torch.equal(o, expected)
