"""`memory_efficient_attention` with the bias classes of xFormers, against dense attention in
float64 with the materialized bias."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import transformer_kernels as tk
from tests.integrations.flash_attn.plain import assert_agrees
from tests.support.operators import FORWARD, operators_run_by
from tests.support.oracle import plain_attention
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.integrations import xformers as xops
from transformer_kernels.integrations.xformers import fmha

biases: Any = fmha.attn_bias  # untyped: the calls unpack their arguments
attend: Any = fmha.memory_efficient_attention
attend_lse: Any = fmha.memory_efficient_attention_forward_requires_grad
attend_part: Any = fmha.memory_efficient_attention_partial
merge: Any = fmha.merge_attentions
ARGUMENTS = "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None"
SIGNATURES = {
    **dict.fromkeys([x for x in fmha.__all__ if x.startswith("memory_efficient_")], ARGUMENTS),
    "merge_attentions": "attn_split, lse_split, write_lse=True, output_dtype=None",
}
"""The signatures in xFormers 0.0.35, without types."""

CAUSAL, AT_END = biases.LowerTriangularMask(), biases.LowerTriangularFromBottomRightMask()
DENSE: dict[str, Any] = {
    "none": None,
    "causal": CAUSAL,
    "bottom-right": AT_END,
    "local": AT_END.make_local_attention(9),
    "window": biases.LocalAttentionFromBottomRightMask(7, 3),
}
LENGTHS_Q, LENGTHS_K, ROOM, PAGE = [3, 40, 0, 1], [5, 67, 2, 64], 72, 8
M, N = sum(LENGTHS_Q), sum(LENGTHS_K)
TABLES = torch.arange(4 * ROOM // PAGE).flip(0).view(-1, 4).T
PADDED, PAGED = (LENGTHS_Q, ROOM, LENGTHS_K), (LENGTHS_Q, LENGTHS_K, TABLES, PAGE)
packed = biases.BlockDiagonalMask.from_seqlens(LENGTHS_Q, LENGTHS_K, device="cpu")
cache = biases.BlockDiagonalPaddedKeysMask.from_seqlens(*PADDED, device="cpu")
cache_causal = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask
cache_local = biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask
pages_causal = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
pages_local = biases.PagedBlockDiagonalCausalLocalPaddedKeysMask
PACKED: dict[str, Any] = {
    "packed": packed,
    "packed-causal": packed.make_causal(),
    "packed-bottom-right": packed.make_causal_from_bottomright(),
    "packed-local": packed.make_local_attention(9),
    "packed-local-bottom-right": packed.make_local_attention_from_bottomright(9),
}
CACHED: dict[str, Any] = {
    "padded": cache,
    "padded-causal": cache_causal.from_seqlens(*PADDED),
    "padded-window": cache.make_local_attention(7, 3),
    "padded-local": cache_local.from_seqlens_local(*PADDED, 9),
    "paged": biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens(*PAGED),
    "paged-causal": cache.make_paged(TABLES, PAGE, pages_causal),
    "paged-local": pages_local.from_seqlens_local(*PAGED, 9),
}
CACHED = {name: bias.to("cpu") for name, bias in CACHED.items()}
ALL = DENSE | PACKED | CACHED


def plain(q: Any, k: Any, v: Any, added: Any = None, *, bias: Any = None) -> Any:
    """Returns (o, lse) of dense attention, for tensors (B, length, H, width)."""
    if bias is not None:
        mask = bias.materialize((q.shape[1], k.shape[1]), q.dtype)
        mask = pad(mask, (0, k.shape[1] - mask.shape[1]), value=-torch.inf)
        added = mask if added is None else added + mask
    q, k, v = (x.transpose(1, 2).nan_to_num(0.0) for x in (q, k, v))
    o, lse = plain_attention(q, k, v, bias=added)
    return o.transpose(1, 2), lse


def calls(bias: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the call with this bias, and the function that it computes."""
    return lambda *x: attend(*x, bias), lambda *x: plain(*x, bias=bias)[0]


def drawn(M: int, N: int, B: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = (B, M, 2, 24), (B, N, 2, 24), (B, N, 2, 17)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def drawn_for(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Keys of a cache that are not in use are NaN."""
    if name not in CACHED:
        return drawn(35, 67, dtype=dtype) if name in DENSE else drawn(M, N, 1, dtype)
    q, k, v = drawn(M, 4 * ROOM, 1, dtype)
    pages = torch.arange(4 * ROOM).view(4, ROOM)
    if "paged" in name:
        pages = (TABLES[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
    for row, length in zip(pages, LENGTHS_K, strict=True):
        k[:, row[length:]] = v[:, row[length:]] = torch.nan
    return q, k, v


@each(("name", "expected"), SIGNATURES.items())
def test_signatures(name: str, expected: str) -> None:
    parameters = inspect.signature(getattr(fmha, name)).parameters.values()
    plain = inspect.Signature([x.replace(annotation=x.empty) for x in parameters])
    assert str(plain) == f"({expected})"
    if name in xops.__all__:
        assert getattr(xops, name) is getattr(fmha, name)


PATTERNS: list[tuple[Any, str]] = [
    (CAUSAL, "1000 1100 1110"),
    (AT_END, "1100 1110 1111"),
    (AT_END, "000 100 110 111"),
    (AT_END.make_local_attention(2), "1100 0110 0011"),
    (biases.LocalAttentionFromBottomRightMask(1, 0), "1100 0110 0011"),
    (biases.BlockDiagonalMask.from_seqlens([1, 2], [3, 1]), "1110 0001 0001"),
    (biases.BlockDiagonalCausalMask.from_seqlens([2, 1], [3, 1]), "1000 1100 0001"),
    (biases.BlockDiagonalCausalFromBottomRightMask.from_seqlens([2, 1], [3, 1]), "1100 1110 0001"),
    (biases.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 3, [2, 3]), "110000 000111"),
    (cache_causal.from_seqlens([2], 4, [3]), "1100 1110"),
    (biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1, 1], [3, 1], torch.tensor([[3, 0], [1, 2]]), 2), "10000011 00100000"),
]  # fmt: skip


@each(("bias", "pattern"), PATTERNS)
def test_materialize(bias: Any, pattern: str) -> None:
    """These are the patterns of xFormers 0.0.35."""
    expected = torch.tensor([[float(x) for x in row] for row in pattern.split()]).log()
    got = bias.materialize((2, *expected.shape), torch.float16)
    assert torch.equal(got, expected.half().expand(2, -1, -1))


def of_xformers(bias: Any) -> Any:
    """Returns an object with the names of the class and the fields."""
    theirs = type(type(bias).__name__, (), {})()
    for name, x in vars(bias).items():
        fields = {key: y for key, y in getattr(x, "__dict__", {}).items() if y is not None}
        setattr(theirs, name, SimpleNamespace(**fields) if "seqinfo" in name else x)
    return theirs


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_biases(name: str, dtype: torch.dtype) -> None:
    """A backward pass copies the keys of a cache; a call without it reads them in place."""
    bias, tensors = ALL[name], drawn_for(name, dtype)
    for q, k, v in [tensors, tuple(x[:, :35] for x in tensors)] if name in DENSE else [tensors]:
        assert_agrees(*calls(bias), (q, k, v))
        got, expected = attend_lse(q, k, v, bias), plain(q, k, v, bias=bias)
        exact = plain(q.double(), k.double(), v.double(), bias=bias)
        for n, part in enumerate(("o", "lse")):
            assert_within_rule(part, got[n], exact[n], expected[n])
        if bias is not None:
            assert torch.equal(attend(q, k, v, of_xformers(bias)), got[0])


@each("shape", [(2, 2, 35, 67), (1, 2, 1, 67), (35, 67), (2, 1, 35, 1)])
def test_tensor_bias(shape: tuple[int, ...]) -> None:
    """With its gradient, and with a causal mask."""
    tensors = (*drawn(35, 67), torch.randn(shape))
    assert_agrees(attend, calls(None)[1], tensors)
    assert_agrees(lambda *x: attend(*x[:3], CAUSAL.add_bias(x[3])), calls(CAUSAL)[1], tensors)


@each("bias", [torch.randn(2, 35, 67), torch.randn(1, 67), AT_END])
def test_one_head(bias: Any) -> None:
    q, k, v = (x[:, :, 0] for x in drawn(35, 67))
    (o, lse), of_heads = attend_lse(q, k, v, bias), bias
    if isinstance(bias, Tensor) and bias.dim() == 3:
        of_heads = bias[:, None]
    assert torch.equal(o, attend(q[:, :, None], k[:, :, None], v[:, :, None], of_heads)[:, :, 0])
    assert lse.shape == (2, 1, 35)


@each("shape", [(1, 1, 1, 35, 67), (2, 3, 2, 35, 67), (3, 1, 1, 67)])
def test_groups_of_heads(shape: tuple[int, ...]) -> None:
    q, *kv = (torch.randn(2, n, 3, h, 24) for n, h in ((35, 2), (67, 1), (67, 1)))

    def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return attend(q, *(x.expand(-1, -1, -1, 2, -1) for x in (k, v)), bias)

    def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        q, k, v = (x.expand(-1, -1, -1, 2, -1).flatten(2, 3) for x in (q, k, v))
        return plain(q, k, v, bias.expand(2, 3, 2, 35, 67).flatten(1, 2))[0].unflatten(2, (3, 2))

    assert_agrees(grouped, expected, (q, *kv, torch.randn(shape)))
    expanded = [x.expand(-1, -1, -1, 2, -1) for x in kv]
    o, lse = attend_lse(q, *expanded)
    assert lse.shape == (2, 3, 2, 35)
    assert torch.equal(attend(q, *kv), o)
    leaves = [
        [make(x).requires_grad_() for x in expanded] for make in (Tensor.detach, Tensor.clone)
    ]
    for tensors in leaves:  # gradients of expanded leaves are those of each head
        attend(q, *tensors).sum().backward()
    assert_same_function(*([x.grad for x in tensors] for tensors in leaves))


@each("name", ["packed-causal", "padded-causal", "paged-causal"])
def test_packed_groups_and_trailing_queries(name: str) -> None:
    q, k, v = drawn_for(name)
    q, bias = torch.cat([q, q], dim=1), ALL[name]
    o, lse = attend_lse(*(x.unsqueeze(3) for x in (q, k, v)), bias)
    assert torch.equal(o[:, :, :, 0], attend(q, k, v, bias))
    assert (lse.shape, o[:, M:].any()) == ((1, 2, 1, 2 * M), False)


def test_sequences_are_split_again() -> None:
    """As DINOv2 joins crops of images, which sets the batch sizes itself."""
    x, y = torch.randn(2, 5, 2, 8), torch.randn(3, 4, 2, 8)
    bias, row = biases.BlockDiagonalMask.from_tensor_list([x, y])
    for own, part in zip((x, y), bias.split(attend(row, row, row, bias)), strict=True):
        assert_same_function(part, attend(own, own, own))
    for mask, wrong in ((packed, row), (bias, row[:, :4])):
        with pytest.raises(ValueError, match=r"use split_queries|tensor must be \(1, 22, "):
            mask.split(wrong)
    bias = biases.BlockDiagonalMask.from_seqlens([5, 5, 4, 4, 4])
    bias._batch_sizes = [2, 3]
    assert [z.shape[0] for z in bias.to("cpu").make_causal().split(row)] == [2, 3]
    keys = [y, x[:1].expand(3, -1, -1, -1)]
    bias, *qkv = biases.BlockDiagonalMask.from_tensor_lists_qkv([y, y], keys, keys)
    assert [z.shape[:2] for z in bias.split_kv(qkv[2])] == [(3, 4), (3, 5)]
    assert [z.shape[:2] for z in bias.split_queries(attend(*qkv, bias))] == [(3, 4), (3, 4)]


@each("room", [4, 8])
def test_no_loop_over_sequences(room: int) -> None:
    """One kernel, and as many operators for many sequences as for few."""
    ran = []
    for B in (2, 50):
        lengths, q, k = [4] * B, torch.ones(1, 4 * B, 2, 8), torch.ones(1, room * B, 2, 8)
        bias: Any = biases.BlockDiagonalCausalMask.from_seqlens(lengths)
        if room > 4:
            bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens(lengths, room, lengths)
        ran.append(operators_run_by(partial(attend, q, k, k, bias.to("cpu"))))
    assert ran[0] == ran[1]
    assert ran[0][FORWARD] == 1


def test_other_arguments() -> None:
    q, k, v = drawn_for("packed")
    options: Any = {"dropout_p": 0.4, "scale": 0.2}
    starts = packed.q_seqinfo.seqstart, packed.k_seqinfo.seqstart
    torch.manual_seed(3)
    o = attend(q, k, v, packed, 0.4, 0.2, output_dtype=torch.bfloat16)
    dense = attend(q, k, v, None, 0.4, 0.2)
    torch.manual_seed(3)
    assert torch.equal(o[0], tk.attention_varlen(q[0], k[0], v[0], *starts, **options).bfloat16())
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(dense.transpose(1, 2), tk.attention(q, k, v, **options))


@each("groups", [False, True])
def test_merge_attentions(groups: bool) -> None:
    """Of keys that some queries do not see: some see none of them."""
    hidden = torch.full((35, 67), -torch.inf)
    hidden[20:, 30:] = hidden[5:, :30] = 0.0

    def merged(*tensors: Tensor) -> Any:
        q, k, v = (x.unsqueeze(3) if groups else x for x in tensors)
        parts = [
            attend_part(q, k[:, keys], v[:, keys], hidden[:, keys])
            for keys in (slice(30), slice(30, 55), slice(55, 67))
        ]
        os, lses = zip(*parts, strict=True)
        o, lse = merge(os, lses)
        alone, none = merge(torch.stack(os), torch.stack(lses), write_lse=False)
        assert torch.equal(alone, o)
        assert none is None
        return torch.cat([o.flatten(2), lse.flatten(1, -2).transpose(1, 2)], dim=-1)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Any:
        o, lse = plain(q, k, v, hidden.to(q.dtype))
        return torch.cat([o.flatten(2), lse.transpose(1, 2)], dim=-1)

    q, k, v = drawn(35, 67)
    assert merged(q, k, v)[0, 0, -1] == -torch.inf
    assert attend_part(q.half(), k.half(), v.half())[0].dtype is torch.float32
    for os, lses in (([], []), ([q], [q[..., 0], q[..., 0]]), (q[None], q[None, ..., 0])):
        with pytest.raises(ValueError, match=r"attn_split .*must h"):
            merge(os, lses)
    assert_agrees(lambda *x: merged(*x)[:, 5:], lambda *x: expected(*x)[:, 5:], (q, k, v))


@pytest.mark.exhaustive
@each("name", ["packed-causal", "padded-causal"])
def test_compiled_training(name: str) -> None:
    call, expected = calls(ALL[name])
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_agrees(compiled, expected, drawn_for(name))
