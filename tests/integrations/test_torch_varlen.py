"""`torch.nn.attention.varlen` on CPUs under `enable`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.integrations.flash_attn.plain import (
    assert_agrees,
    by_sequence,
    in_pages,
    starts,
    with_gradients,
)
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.common import torch_private

if torch_private.MISSING_FOR_VARLEN:
    pytest.skip("torch has no varlen_attn_out", allow_module_level=True)

from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

LENGTHS_Q, LENGTHS_K = (3, 70, 0, 1, 17), (5, 67, 4, 0, 17)
OFFSETS = starts(LENGTHS_Q), starts(LENGTHS_K)
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "left": (9, 0), "both": (5, 3), "right": (-1, 2)}


@pytest.fixture(autouse=True)
def _switched() -> Iterator[None]:
    with tk.enabled():
        yield


def packed(dtype: torch.dtype = torch.float32, H_kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (torch.randn(sum(LENGTHS_K), H_kv, 12, dtype=dtype) for _ in range(2))
    return torch.randn(sum(LENGTHS_Q), 4, 12, dtype=dtype), k, v


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    o, lse = varlen_attn(
        q, k, v, *OFFSETS, max(LENGTHS_Q), max(LENGTHS_K), return_aux=AuxRequest(lse=True),
        enable_gqa=k.shape[1] != q.shape[1], **options,
    )  # fmt: skip
    return o, lse


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window_size", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("H_kv", [4, 2])
def test_against_float64(dtype: torch.dtype, window_size: tuple[int, int], H_kv: int) -> None:
    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"window_size": window_size, "softmax_scale": 0.2}
        return by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, **options)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, window_size=window_size, scale=0.2)[0]

    assert_agrees(call, expected, packed(dtype, H_kv))


def test_the_causal_flag_of_the_operators() -> None:
    """`varlen_attn` sets it together with the window (-1, 0)."""

    def by_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = torch.ops.aten._flash_attention_forward
        o: Tensor = operator(q, k, v, *OFFSETS, 70, 67, 0.0, True, False)[0]
        return o

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, causal=True)

    assert_agrees(by_flag, expected, packed())


def test_log_sum_exp() -> None:
    q, k, v = packed(H_kv=4)
    _, lse = attend(q, k, v)
    _, expected = tk.attention_varlen(q, k, v, *OFFSETS, return_lse=True)
    assert lse.shape == (4, sum(LENGTHS_Q))
    assert torch.equal(lse, expected)


def test_out() -> None:
    q, k, v = packed(H_kv=4)
    out = torch.full_like(q, float("nan"))
    varlen_attn_out(out, q, k, v, *OFFSETS, max(LENGTHS_Q), max(LENGTHS_K))
    assert torch.equal(out, attend(q, k, v)[0])


def test_keys_in_use() -> None:
    """Keys past seqused_k hold NaN; causal masks are aligned to the last key in use."""
    q, k, v = packed()
    used = torch.tensor([2, 60, 0, 0, 17], dtype=torch.int32)
    keep = torch.zeros(len(k), dtype=torch.bool)
    for start, count in zip(OFFSETS[1].tolist(), used.tolist(), strict=False):
        keep[start : start + count] = True
    k, v = (x.masked_fill(~keep[:, None, None], float("nan")) for x in (k, v))
    o, lse = attend(q, k, v, seqused_k=used, window_size=(-1, 0))
    expected, expected_lse = tk.attention_varlen(
        q, k[keep], v[keep], OFFSETS[0], starts(tuple(used.tolist())),
        mask=tk.Mask.causal(align="bottom_right"), return_lse=True,
    )  # fmt: skip
    assert torch.equal(o, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (4, 4, 4), (1, 4, 9)], ids=str)
@pytest.mark.parametrize("window_size", [(-1, 0), (7, 0)], ids=str)
def test_pages(page_size: int, lengths_q: tuple[int, ...], window_size: tuple[int, int]) -> None:
    """Pages in random order; rows that are not in use hold NaN."""
    lengths_k = (33, 9, 16)
    q = torch.randn(sum(lengths_q), 4, 12)
    k, v = (torch.randn(sum(lengths_k), 2, 12) for _ in range(2))
    columns = -(-max(lengths_k) // page_size)
    table = torch.randperm(3 * columns).view(3, columns).int()
    k_pages, v_pages = (in_pages(x, lengths_k, page_size, table) for x in (k, v))
    table[torch.arange(columns) * page_size >= torch.tensor(lengths_k)[:, None]] = 2**31 - 1
    o, lse = varlen_attn(
        q, k_pages, v_pages, starts(lengths_q), None, max(lengths_q), max(lengths_k),
        enable_gqa=True, seqused_k=torch.tensor(lengths_k, dtype=torch.int32), block_table=table,
        window_size=window_size, return_aux=AuxRequest(lse=True), num_splits=1,
    )  # fmt: skip
    left = None if window_size[0] < 0 else window_size[0]
    expected, expected_lse = tk.attention_varlen(
        q, k, v, starts(lengths_q), starts(lengths_k),
        mask=tk.Mask.window(left, 0, align="bottom_right"), return_lse=True,
    )  # fmt: skip
    assert_same_function(o, expected)
    assert_same_function(lse, expected_lse)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_compiled_training(compiler: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, window_size=(-1, 0))[0]

    tensors, do = packed(), torch.randn(sum(LENGTHS_Q), 4, 12)
    compiled: Any = torch.compile(call, backend=compiler, fullgraph=True)
    got, expected = (with_gradients(function, tensors, do) for function in (compiled, call))
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("H_kv", [4, 2])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_operators_of_torch_are_what_their_fakes_say(H_kv: int, requires_grad: bool) -> None:
    """Compiled code relies on shapes and strides: here those of slices of one projection."""
    qkv, cu_seqlens = torch.randn(40, 12, 12), torch.tensor([0, 10, 40], dtype=torch.int32)
    q, k, v = qkv[:, :4], qkv[:, 4 : 4 + H_kv], qkv[:, 8 : 8 + H_kv]
    q, k, v = (x.detach().requires_grad_(requires_grad) for x in (q, k, v))
    sizes = (cu_seqlens, cu_seqlens, 30, 30, False)
    operators = torch.ops.torch_attn
    torch.library.opcheck(operators._varlen_attn, (q, k, v, *sizes))
    if not requires_grad:
        o, lse, state = operators._varlen_attn(q, k, v, *sizes)
        arguments = (torch.randn_like(o), q, k, v, o, lse, *sizes, state)
        # torch has no second derivative of it.
        utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(operators._varlen_attn_backward, arguments, test_utils=utils)


@pytest.mark.parametrize("M", [1, 3])
def test_pages_are_what_the_fake_says(M: int) -> None:
    q, pages, used = torch.randn(2 * M, 2, 12), torch.randn(4, 16, 2, 12), torch.tensor([3, 16])
    table = torch.tensor([[3], [0]], dtype=torch.int32)
    sizes = (torch.tensor([0, M, 2 * M]), None, M, 16)
    options = {"is_causal": True, "seqused_k": used, "block_table": table}
    torch.library.opcheck(torch.ops.torch_attn._varlen_attn, (q, pages, pages, *sizes), options)


REFUSED: dict[str, dict[str, Any]] = {
    "cum_seq_q must be a tensor": {"cum_seq_q": None},
    "dropout_p must be 0, got 0.1": {"dropout_p": 0.1},
    "return_debug_mask must be False": {"return_debug_mask": True},
    "alibi_slopes must be None": {"alibi_slopes": torch.ones(4)},
    "block_table needs seqused_k": {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    "cum_seq_k must be a tensor": {"cum_seq_k": None, "seqused_k": torch.tensor([1, 2])},
    "seqused_k must be between 0 and": {"seqused_k": torch.tensor([6, 60, 0, 0, 17])},
    "of each sequence, .*, got .-1, 60": {"seqused_k": torch.tensor([-1, 60, 0, 0, 17])},
    "of each sequence, .*, got .1, 60.": {"seqused_k": torch.tensor([1, 60])},
    "max_seqlen_q must be at least 70": {"max_q": 69},
}


@each("message", REFUSED)
def test_invalid_calls_of_the_operator(message: str) -> None:
    q, k, v = packed()
    valid: dict[str, Any] = {
        "cum_seq_q": OFFSETS[0], "cum_seq_k": OFFSETS[1],
        "max_q": 70, "max_k": 67, "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False,
    }  # fmt: skip
    torch.ops.aten._flash_attention_forward(q, k, v, **valid)
    with pytest.raises(ValueError, match=message):
        torch.ops.aten._flash_attention_forward(q, k, v, **valid | REFUSED[message])


@pytest.mark.parametrize("page", [-1, 4])
@pytest.mark.parametrize("lengths_q", [(1, 1), (1, 3)], ids=["equal", "different"])
def test_invalid_pages(page: int, lengths_q: tuple[int, int]) -> None:
    pages = torch.randn(4, 16, 2, 12)
    with pytest.raises(ValueError, match="block_table must"):
        varlen_attn(
            torch.randn(sum(lengths_q), 2, 12), pages, pages, starts(lengths_q), None,
            max(lengths_q), 16,
            seqused_k=torch.tensor([7, 9]), block_table=torch.tensor([[0], [page]]),
        )  # fmt: skip
