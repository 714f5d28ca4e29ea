"""Bad arguments of the public functions, and the errors that they raise.

A row is the class of the error, the argument, value or expectation that its message names, with
"..." for any text, and the arguments that differ from those of a valid call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, rand
from torch.nn.attention.flex_attention import create_block_mask

import transformer_kernels as tk

B, H_q, H_kv, M, N, D, D_v, PAGE = 2, 4, 2, 3, 5, 8, 6, 4
HUGE = 10**400
Mask: Any = tk.Mask  # untyped: these calls are wrong on purpose
padding, segments = Mask.padding, Mask.segments
positions, intervals = Mask.positions, Mask.intervals
alibi: Any = tk.alibi
relative_bias: Any = tk.relative_bias
relative_keys: Any = tk.relative_keys


def ints(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def tensor(*values: int) -> Tensor:
    return torch.tensor(values)


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def bytes_(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int8)


def spoiled(value: float, b: int = 1, h: int = 0, j: int = 4) -> Tensor:
    """Scales of a cache, of which one is bad."""
    scale = rand(B, H_kv, 9)
    scale[b, h, j] = value
    return scale


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def inference(*shape: int) -> Tensor:
    with torch.inference_mode():
        return rand(shape)


STARTS, CAUSAL = torch.tensor([0, 2, 9]), Mask.causal()
PAGES = {"k": rand(4, H_kv, PAGE, D), "v": rand(4, H_kv, PAGE, D_v)}
ROWS_OF_PACKED = {"q": rand(9, H_q, D), "k": rand(9, H_kv, D), "v": rand(9, H_kv, D_v)}
PACKED = {**ROWS_OF_PACKED, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
CACHE = {"k_cache": rand(B, H_kv, 9, D), "v_cache": rand(B, H_kv, 9, D)}
SCALES = "k_scale", "v_scale"
NEW = {"k": rand(B, H_kv, 2, D), "v": rand(B, H_kv, 2, D_v)}
DENSE = {"q": rand(B, H_q, M, D), "k": rand(B, H_kv, N, D), "v": rand(B, H_kv, N, D)}
INT8 = dict.fromkeys(CACHE, bytes_(B, H_kv, 9, D)) | dict.fromkeys(SCALES, rand(B, H_kv, 9))
BLOCK_MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 99, 99, "cpu")

Valid = dict[str, tuple[Callable[..., object], dict[str, Any]]]
VALID: Valid = {
    "attention": (tk.attention, DENSE),
    "attention, options": (
        tk.attention,
        {
            **DENSE, "bias": rand(M, N), "sinks": torch.ones(H_q), "seed": torch.tensor(3),
            "scale": torch.ones(()), "dropout_p": 0.5,
        },
    ),
    "attention_varlen": (tk.attention_varlen, PACKED),
    "attention_varlen, paged": (
        tk.attention_varlen, {**PACKED, **PAGES, "block_table": torch.tensor([[0, 9], [2, 3]])},
    ),
    "attention_decode": (
        tk.attention_decode,
        {"q": rand(B, H_q, 1, D), **CACHE, "cache_seqlens": torch.tensor([9, 5])},
    ),
    "attention_decode, paged": (
        tk.attention_decode,
        {
            "q": rand(B, H_q, 1, D), "k_cache": rand(5, H_kv, PAGE, D),
            "v_cache": rand(5, H_kv, PAGE, D), "cache_seqlens": torch.tensor([9, 5]),
            "block_table": torch.tensor([[0, 1, 2], [3, 4, -1]]),
        },
    ),
    "attention_decode, int8": (
        tk.attention_decode,
        {"q": rand(B, H_q, 1, D), **INT8, "cache_seqlens": torch.tensor([9, 5])},
    ),
    "quantize_cache": (tk.quantize_cache, NEW),
    "append_to_cache, int8": (
        tk.append_to_cache,
        {**INT8, "v_cache": bytes_(B, H_kv, 9, D_v), **NEW, "cache_seqlens": STARTS[1:]},
    ),
    "append_to_cache": (
        tk.append_to_cache,
        {**CACHE, "v_cache": rand(B, H_kv, 9, D_v), **NEW, "cache_seqlens": STARTS[1:]},
    ),
    "attention_weights": (tk.attention_weights, {"q": DENSE["q"], "k": DENSE["k"], "rows": [0]}),
}  # fmt: skip
"""Name -> a function, and the arguments of a valid call."""


class Row(NamedTuple):
    """A call that raises."""

    error: type[Exception]
    message: str
    changes: dict[str, Any]


def type_error(message: str, **changes: Any) -> Row:
    return Row(TypeError, message, changes)


def value_error(message: str, **changes: Any) -> Row:
    return Row(ValueError, message, changes)


ON_META = "is on meta, q is on cpu"
TABLE, KEYS = torch.ones(H_q, 3), torch.ones(H_q, 3, D)
AT_END: Any = {"lowest": 0, "align": "bottom_right"}
table_at_end, keys_at_end = partial(relative_bias, **AT_END), partial(relative_keys, **AT_END)
alibi_at_end = partial(alibi, align="bottom_right")
OF_HEADS = "of relative must be (H_q or 1, E"
RELATIVE = [
    type_error(
        "relative must be relative_bias(table), relative_keys(keys) or None, got a tensor",
        relative=TABLE,
    ),
    type_error("relative must be ..., got Alibi", relative=alibi(torch.ones(H_q))),
    value_error(
        f"the table {OF_HEADS}) with H_q = 4, got shape (3, 3)",
        relative=table_at_end(torch.ones(3, 3)),
    ),
    value_error(f"the table of relative {ON_META}", relative=table_at_end(meta(4, 3))),
    value_error(
        f"the keys {OF_HEADS}, D) with H_q = 4 and D = 8, got shape (3, 3, 8)",
        relative=keys_at_end(torch.ones(3, 3, D)),
    ),
    value_error(
        "with H_q = 4 and D = 8, got shape (4, 3, 9)", relative=keys_at_end(rand(H_q, 3, D + 1))
    ),
    value_error("the keys of relative are on meta, q...", relative=keys_at_end(meta(4, 3, 8))),
    value_error(
        f"the table {OF_HEADS}) with H_q = 4, got shape (3, 3)",
        relative=keys_at_end(KEYS, table=torch.ones(3, 3)),
    ),
]
SCORES = [
    *RELATIVE,
    type_error("q must be a tensor, got list", q=[1.0]),
    type_error("q must be ..., got list", q=[1.0], scale=torch.ones(())),
    type_error("mask must be a Mask or None, got Tensor", mask=bools(M, N)),
    type_error("scale must be a number, got '1'", scale="1"),
    type_error("scale must be a number", scale=[1.0]),
    type_error("scale must be float32, got ...64", scale=torch.ones((), dtype=torch.float64)),
    type_error("scale must be float32, got torch.int64", scale=torch.tensor(1)),
    value_error("scale must be finite, got nan", scale=math.nan),
    value_error("scale must fit in a float, got an int of 1329 bits", scale=HUGE),
    value_error("scale must have one element, got shape (2,)", scale=torch.ones(2)),
    value_error("scale must have one element, got shape (0,)", scale=torch.ones(0)),
    value_error(f"scale {ON_META}", scale=meta()),
    value_error("softcap must be positive, got 0.0", softcap=0.0),
    value_error("softcap must be positive, got -1", softcap=-1),
    value_error("softcap must be finite, got inf", softcap=math.inf),
    value_error("softcap must fit in a float", softcap=HUGE),
    type_error("bias must be ...alibi(slopes) or None, got [0.0]", bias=[0.0]),
    value_error("slopes must be (H_q,) = (4,) or ..., got (3,)", bias=alibi_at_end(torch.ones(3))),
    value_error("or (B, H_q) = (2, 4), got (1, 4)", bias=alibi_at_end(torch.ones(1, 4))),
    value_error("slopes are on meta, q is on cpu", bias=alibi_at_end(meta(4))),
    type_error("sinks must be a floating-point tensor, got", sinks=[0.0] * 4),
    type_error("sinks must be a floating-point", sinks=ints(4)),
    value_error("sinks must be (H_q,) = (4,), got (4, 1)", sinks=torch.ones(4, 1)),
    value_error("sinks must be (H_q,) = (4,), got (3,)", sinks=torch.ones(3)),
    value_error(f"sinks {ON_META}", sinks=meta(4)),
    *(
        type_error("return_lse must be True or False, got", return_lse=x)
        for x in (torch.ones(3), "yes", 1, None)
    ),
    *(
        value_error("backend must be one of 'auto', 'cpu', ..., got", backend=x)
        for x in (np.array(["cpu", "cpu"]), 3, None, b"cpu", "gpu")
    ),
]
DROPOUT = [
    type_error("dropout_p must be a number, got True", dropout_p=True),
    value_error("dropout_p must be between 0 and 1, got -0.1", dropout_p=-0.1),
    value_error("dropout_p must be between 0 and 1, got 1.1", dropout_p=1.1),
    value_error("dropout_p must be finite, got nan", dropout_p=math.nan),
    value_error("dropout_p must fit in a float", dropout_p=-HUGE),
    type_error("seed must be an int or an int64 scalar ... got 1.5", seed=1.5),
    type_error("seed must be ... (2,)", seed=ints(2)),
    type_error("seed must be ... torch.float32", seed=torch.tensor(1.0)),
    value_error(f"seed must be at most {(1 << 63) - 1}, got {1 << 63}", seed=1 << 63),
    value_error("seed must be at most", seed=HUGE),
    value_error(f"seed {ON_META}", seed=meta(dtype=torch.int64)),
]
ATTENTION = [
    *SCORES,
    *DROPOUT,
    type_error("mask must be a Mask or None, got Tensor; wrap", mask=bools(M, N)),
    type_error("k must be a tensor, got NoneType", k=None),
    type_error("q must be ...torch.int64", q=ints(B, H_q, M, D)),
    type_error("k must be ...torch.complex64", k=rand(B, H_kv, N, D) + 0j),
    type_error("v torch.float16, q torch.float32", v=rand(B, H_kv, N, D).half()),
    type_error("layout torch.sparse_coo", q=torch.ones(B, H_q, M, D).to_sparse()),
    value_error("q must be (batch, ... (4, 3, 8)", q=rand(4, 3, 8)),
    value_error("v must be ... (1, 2, 2, 5, 8)", v=rand(1, 2, 2, 5, 8)),
    value_error("k on meta, q on cpu", k=meta(B, H_kv, N, D)),
    value_error("batch size, got ...k (1, 2, 5, 8)", k=rand(1, H_kv, N, D)),
    value_error("multiple of k's, got q (2, 3, 3, 8)", q=rand(B, 3, M, D)),
    value_error("positive multiple", q=rand(B, 0, M, D)),
    value_error("k and v must share heads and length", v=rand(B, 1, N, D)),
    value_error("k and v must share heads and length", v=rand(B, H_kv, 4, D)),
    value_error("q and k must share the width D", k=rand(B, H_kv, N, 7)),
    value_error("D and D_v must be at least 1", q=rand(B, H_q, M, 0), k=rand(B, H_kv, N, 0)),
    type_error("bias must be ...got torch.bool", bias=bools(M, N)),
    type_error("bias must be ...got torch.float64", bias=torch.ones(M, N).double()),
    type_error("bias must be ...got torch.float16", bias=torch.ones(M, N).half()),
    value_error("bias ... = (2, 4, 3, 5), got (1, 1, 5, 3)", bias=torch.ones(N, M)),
    value_error("bias must broadcast to ...(1, 2, 3, 5)", bias=torch.ones(H_kv, M, N)),
    value_error("bias must broadcast to", bias=torch.ones(1, 1, 1, M, N)),
    value_error(f"bias {ON_META}", bias=meta(M, N)),
    value_error("(batch,) = (2,), got (1,)", mask=padding(ints(1))),
    value_error("end ...(1,)", mask=Mask.key_range(ints(2), ints(1))),
    value_error("k_ids ...(2, 5), got (2, 3)", mask=segments(ints(B, M))),
    value_error("q_ids ...(2, 3), got (1, 3)", mask=segments(ints(1, M), ints(1, N))),
    value_error("k_pos ...(2 or 1, 4 or 1, 5), got (3, 5)", mask=positions(ints(1, M), ints(3, N))),
    value_error(
        "high ... 4 or 1, 3), got (2, 5)", mask=intervals(ints(2, M), ints(2, N), ints(1, N))
    ),
    value_error("q_pos ... 4 or 1, 3), got (1, 2, 3)", mask=positions(ints(1, 2, M), ints(1, N))),
    value_error("dense ...(1, 1, 5, 3)", mask=Mask.dense(bools(N, M))),
    value_error("must broadcast", mask=Mask.from_block_mask(BLOCK_MASK)),
    value_error("Dense.attn_mask is on meta", mask=Mask.dense(meta(M, N, dtype=torch.bool))),
    value_error(
        "indices ...(2 or 1, 4 or 1, 3, count), got (2, 1, 5, 7)", mask=Mask.selected(ints(B, N, 7))
    ),
    value_error("indices ...got (2, 2, 3, 1)", mask=Mask.selected(ints(B, 2, M, 1))),
    value_error(
        "indices must be less than 3 for N = 5, block_size = 2, got 3",
        mask=Mask.selected(torch.full((1, M, 1), 3), 2),
    ),
    value_error("(4 or 1, 2, 3)...2, 2", mask=Mask.block_sparse(bools(2, 2), 2)),
    value_error("(4 or 1, ...(2, 2, 3)", mask=Mask.block_sparse(bools(2, 2, 3), 2)),
    *(
        value_error(
            f"{name} must be (batch, heads, length, width)",
            **{name: torch.ones(shape, requires_grad=needs_grad), "mask": mask},
        )
        for name, shape, needs_grad, mask in product(
            "qkv",
            ((), (3,)),
            (False, True),
            (None, CAUSAL, padding(ints(B)), Mask.dense(bools(M, N))),
        )
    ),
    *(
        # The result would be too large to allocate.
        value_error(
            "q, k and v must share the batch size",
            q=rand(1, 1, 1, D).expand(1 << 50, 1, 1, D).requires_grad_(needs_grad),
        )
        for needs_grad in (False, True)
    ),
]
VARLEN = [
    *SCORES,
    *DROPOUT,
    type_error("k must be ...torch.int64", k=ints(9, H_kv, D)),
    value_error("q must be (length, heads, width), got shape (1, 9, 4, 8)", q=rand(1, 9, H_q, D)),
    value_error("multiple of k's, got q ... k (9, 3, 8)", k=rand(9, 3, D), v=rand(9, 3, D)),
    value_error("k and v must share heads and length", v=rand(8, H_kv, D)),
    value_error("q and k must share the width D", k=rand(9, H_kv, 9)),
    type_error("cu_seqlens_q must be a tensor, got list", cu_seqlens_q=[0, 9]),
    type_error("cu_seqlens_q must be int32 or int64, got ...32", cu_seqlens_q=STARTS.float()),
    type_error("cu_seqlens_k must be ...torch.int16", cu_seqlens_k=STARTS.short()),
    value_error("cu_seqlens_q must be (B + 1,), got shape (1, 3)", cu_seqlens_q=STARTS[None]),
    value_error("cu_seqlens_k must be ... shape (0,)", cu_seqlens_k=STARTS[:0]),
    value_error(f"cu_seqlens_q {ON_META}", cu_seqlens_q=STARTS.to("meta")),
    value_error(
        "cu_seqlens_q and cu_seqlens_k ... same shape, got (3,) and (2,)", cu_seqlens_k=STARTS[:2]
    ),
    value_error("cu_seqlens_q must start at 0, got 1", cu_seqlens_q=STARTS + 1),
    value_error("cu_seqlens_q must not decrease, got 9, then 8 at 2", cu_seqlens_q=tensor(0, 9, 8)),
    value_error(
        "cu_seqlens_q must end within the 9 rows of q, got 10", cu_seqlens_q=tensor(0, 0, 10)
    ),
    value_error(
        "cu_seqlens_k must end within the 8 rows of k, got 9",
        k=rand(8, H_kv, D),
        v=rand(8, H_kv, D),
        cu_seqlens_k=None,
    ),
    value_error("fewer than 2^31", cu_seqlens_q=STARTS[:1].expand(1 << 40), cu_seqlens_k=None),
    value_error("max_seqlen_q ... 7, the longest length in cu_seqlens_q, got 6", max_seqlen_q=6),
    value_error("max_seqlen_k must be at least 7", max_seqlen_k=3),
    value_error("max_seqlen_k must be at least 7", max_seqlen_k=3, cu_seqlens_k=None),
    value_error("max_seqlen_q must be at least 0, got -1", max_seqlen_q=-1),
    value_error("max_seqlen_q must be at most 2147483647", max_seqlen_q=1 << 63),
    value_error("max_seqlen_k must be at most 2147483647", max_seqlen_k=1 << 31),
    type_error("max_seqlen_q must be an int or None, got 9.0", max_seqlen_q=9.0),
    type_error("max_seqlen_k must be an int ... got True", max_seqlen_k=True),
    *(
        value_error(
            f"mask may combine only Mask.window and Mask.causal for packed sequences, ...{kind}",
            mask=mask,
        )
        for kind, mask in (("KeyRange", CAUSAL & padding(ints(2))), ("Dense", Mask.dense(bools(3))))
    ),
    value_error(
        "mask must have a single align for packed sequences, got both",
        mask=CAUSAL & Mask.window(3, align="bottom_right"),
    ),
    value_error("bias ... or None for packed sequences, got a tensor (3, 3)", bias=rand(3, 3)),
    value_error(
        "mask and bias must have the same align ..., got 'top_left' and 'bottom_right'",
        mask=CAUSAL,
        bias=alibi_at_end(torch.ones(H_q)),
    ),
    *(
        value_error(
            f"{name} and relative must have the same align for packed sequences, got 'top_left' a",
            **{"relative": relative, name: other},
        )
        for relative in (table_at_end(TABLE), keys_at_end(KEYS))
        for name, other in (("mask", CAUSAL), ("bias", alibi(torch.ones(H_q))))
    ),
]
PAGED_VARLEN = [
    value_error("cu_seqlens_k must be a tensor with block_table, got None", cu_seqlens_k=None),
    type_error("block_table must be a tensor, got list", block_table=[[0]]),
    type_error("block_table must be int32 or int64, got", block_table=torch.zeros(2, 2)),
    value_error("block_table ... (B, pages) with B = 2, got shape (3, 2)", block_table=ints(3, 2)),
    value_error(f"block_table {ON_META}", block_table=meta(2, 2, dtype=torch.int64)),
    value_error(
        "must hold pages 0 to 3 of k for all positions in use, got -3 at (1, 1), and sequence 1",
        block_table=torch.tensor([[0, 9], [1, -3]]),
    ),
    value_error(
        "block_table must have pages for 6 keys, ... got 1 pages of 4 keys",
        block_table=ints(2, 1),
        cu_seqlens_k=tensor(0, 2, 8),
    ),
    value_error("k must be (pages, heads, page_size, width), got shape (3, 2)", k=rand(3, 2)),
    value_error("k and v must share heads, pages and page_size", v=rand(4, H_kv, 8, D_v)),
    value_error("page_size of k must be at least 1", k=rand(9, 2, 0, D), v=rand(9, 2, 0, D_v)),
    value_error("cu_seqlens_k must not decrease", cu_seqlens_k=tensor(0, 9, 3)),
    value_error("max_seqlen_k must be at least 7", max_seqlen_k=6),
    type_error("max_seqlen_k must be an int", max_seqlen_k=7.0),
    value_error("cu_seqlens_q and cu_seqlens_k must have the same shape", cu_seqlens_q=STARTS[:2]),
]
LENGTHS = "cache_seqlens must be from 0 to"
DECODE = [
    *SCORES,
    value_error("q must be (batch, heads, length, width), got shape (2, 4, 8)", q=rand(B, H_q, D)),
    type_error("k_cache must be a tensor, got NoneType", k_cache=None),
    type_error(
        "q, k_cache and v_cache must share a dtype, got k_cache torch.float16, q torch.float32",
        k_cache=rand(B, H_kv, 9, D).half(),
    ),
    type_error("v_cache must be ...torch.int64", v_cache=ints(B, H_kv, 9, D)),
    value_error("one device, got k_cache on meta, q on cpu", k_cache=meta(B, H_kv, 9, D)),
    value_error(
        "q, k_cache and v_cache ... batch size, got ... k_cache (3, 2, 9, 8)",
        k_cache=rand(3, H_kv, 9, D),
    ),
    value_error("k_cache and v_cache must share heads and length", v_cache=rand(B, H_kv, 8, D)),
    value_error("q and k_cache must share the width D", k_cache=rand(B, H_kv, 9, D + 1)),
    value_error("q's heads must be a positive multiple of k_cache's", q=rand(B, 3, 1, D)),
    value_error(
        "the cache capacity must be less than 2^31 positions per sequence, got k_cache",
        **dict.fromkeys(CACHE, rand(1).expand(B, H_kv, 1 << 31, D)),
    ),
    type_error("cache_seqlens must be a tensor, got list", cache_seqlens=[9, 9]),
    type_error("cache_seqlens must be int32 or int64, got torch.float32", cache_seqlens=rand(2)),
    value_error("cache_seqlens must be (B,) with B = 2, got shape (1,)", cache_seqlens=ints(1)),
    value_error("cache_seqlens must be (B,) with", cache_seqlens=ints(B, 1)),
    value_error(f"cache_seqlens {ON_META}", cache_seqlens=ints(B).to("meta")),
    value_error(f"{LENGTHS} 9, the capacity of k_cache, got 10 at 1", cache_seqlens=tensor(9, 10)),
    value_error(f"{LENGTHS} ... got -1 at 0", cache_seqlens=tensor(-1, 9)),
    value_error(f"{LENGTHS} ... got 4294967301 at 0", cache_seqlens=tensor((1 << 32) + 5, 9)),
    value_error(
        "mask may combine only Mask.window, Mask.causal and Mask.key_range for decoding, got a "
        "Dense constraint",
        mask=Mask.dense(bools(9)),
    ),
    value_error(
        "the mask's start ... (batch,) = (2,), got (3,)", mask=Mask.key_range(ints(3), ints(3))
    ),
    value_error("the mask's end ... = (2,), got (3,)", mask=padding(ints(3))),
    value_error("the mask's end ... = (2,), got (3,)", mask=padding(ints(B)) & padding(ints(3))),
    value_error(f"the mask's KeyRange.end {ON_META}", mask=padding(ints(B).to("meta"))),
    value_error("mask must have align='bottom_right' ..., got align='top_left'", mask=CAUSAL),
    value_error("bias ... or None for decoding, got a tensor (1, 9)", bias=rand(1, 9)),
    value_error(
        "bias must be alibi(slopes, align='bottom_right') for decoding, got",
        bias=alibi(torch.ones(H_q)),
    ),
    *(
        value_error("relative must have align='bottom_right' for decoding", relative=relative)
        for relative in (relative_bias(TABLE, lowest=0), relative_keys(KEYS, lowest=0))
    ),
    *(
        value_error("relative must not require grad", relative=make(x.clone().requires_grad_()))
        for make, x in ((table_at_end, TABLE), (keys_at_end, KEYS))
    ),
    value_error(
        "scale must not require grad, because attention_dec", scale=rand((), requires_grad=True)
    ),
]
PAGED_DECODE = [
    value_error(
        "k_cache must be (pages, heads, page_size, width), got ... (5, 4, 8)",
        k_cache=rand(5, PAGE, D),
    ),
    value_error("k_cache and v_cache ... pages and page_size", v_cache=rand(6, H_kv, PAGE, D)),
    value_error(
        "page_size of k_cache must be at least 1, got shape (5, 2, 0, 8)",
        **dict.fromkeys(CACHE, rand(5, H_kv, 0, D)),
    ),
    value_error(f"{LENGTHS} 12, ... got 13 at 0", cache_seqlens=tensor(13, 1)),
    # The result would be too large to allocate.
    value_error(
        "q's heads must be a positive multiple of k_cache's",
        q=rand(1, 1, 1, D).expand(1 << 50, 1, 1, D),
    ),
    type_error("block_table must be a tensor", block_table=[[0]]),
    type_error("block_table must be int32 or int64, got torch.bool", block_table=bools(B, 3)),
    value_error("block_table ... (B, pages) with B = 2, got shape (2,)", block_table=ints(B)),
    value_error("block_table ... (B, pages) with B = 2, got shape (3, 3)", block_table=ints(3, 3)),
    value_error(
        "must hold pages 0 to 4 of k_cache ..., got 5 at (0, 2), and sequence 0 has 9 positions",
        block_table=torch.tensor([[0, 1, 5], [3, 4, -1]]),
    ),
    value_error("got -1 at (1, 2), and sequence 1 has 9 positions", cache_seqlens=ints(B) * 9),
]
APPEND = [
    value_error("at least M = 2, got 1 at 0", cache_seqlens=tensor(1, 9)),
    value_error("from 0 to 9, ...got 10 at 1", cache_seqlens=tensor(9, 10)),
    value_error("k and v must be ...got k (2, 4, 2, 8)", k=rand(B, 4, 2, D)),
    value_error("k and v must be ... v (2, 2, 1, 6)", v=rand(B, H_kv, 1, D_v)),
    value_error("k and v must be ...heads and widths", v=rand(B, H_kv, 2, D)),
    value_error("k and k_cache must share the width D", k=rand(B, H_kv, 2, 9)),
    type_error(
        "k, k_cache and v_cache must share a dtype, got k_cache torch.float32, k torch.float16",
        k=rand(B, H_kv, 2, D).half(),
    ),
    type_error("k and v must share a dtype", v=rand(B, H_kv, 2, D_v).half()),
    value_error("must hold pages 0 to 1 of k_cache ... got 3", block_table=tensor(0, 3)[:, None]),
    value_error("v_cache must not require grad", v_cache=rand(B, H_kv, 9, D_v).requires_grad_()),
    value_error("v_cache was made in inference mode", v_cache=inference(B, H_kv, 9, D_v)),
    value_error("v_cache must have memory for each", v_cache=rand(1).expand(B, H_kv, 9, D_v)),
]
TOGETHER = "k_scale and v_scale must be given together, got"
OF_INT8 = [
    value_error(f"{TOGETHER} v_scale None", v_scale=None),
    value_error(f"{TOGETHER} k_scale None", k_scale=None),
    value_error("k_cache is int8: it needs k_scale and v_scale", **dict.fromkeys(SCALES)),
    type_error("k_cache must be int8 with k_scale and v_scale, got torch.float32", **CACHE),
    type_error("v_cache must be int8 ..., got torch.float32", v_cache=rand(B, H_kv, 9, D)),
    type_error("k_scale must be float32, got torch.float64", k_scale=rand(B, H_kv, 9).double()),
    type_error("v_scale must be a tensor, got float", v_scale=0.5),
    value_error("v_scale must be (B, H_kv, N) = (2, 2, 9), got ... (2, 2, 9, 1)",
                v_scale=rand(B, H_kv, 9, 1)),
    value_error("k_scale must be (B, H_kv, N) = (2, 2, 9), got ... (2, 2, 8)",
                k_scale=rand(B, H_kv, 8)),
    value_error("k_scale is on meta, the caches are on cpu", k_scale=meta(B, H_kv, 9)),
    value_error("v_scale must not require grad", v_scale=rand(B, H_kv, 9).requires_grad_()),
]  # fmt: skip
DECODE_INT8 = [
    *OF_INT8,
    type_error("q must be float16, ..., got torch.int8", q=bytes_(B, H_q, 1, D)),
    value_error("k_scale must be finite and not negative, got nan at (1, 0, 4)",
                k_scale=spoiled(math.nan)),
    value_error("v_scale ... got inf at (0, 1, 8)", v_scale=spoiled(math.inf, 0, 1, 8)),
    value_error("k_scale ... got -0.5 at (1, 0, 0)", k_scale=spoiled(-0.5, j=0)),
    value_error(
        "v_scale ... got nan at (1, 0, 4)", v_scale=spoiled(math.nan), sinks=torch.ones(H_q)
    ),
]  # fmt: skip
APPEND_INT8 = [
    *OF_INT8,
    type_error("k must be float16, ..., got torch.int8", k=bytes_(B, H_kv, 2, D)),
    value_error("k must be finite", k=rand(B, H_kv, 2, D) * math.nan),
    value_error("v must be finite", v=rand(B, H_kv, 2, D_v) / 0),
    value_error("v_scale must have memory for each", v_scale=rand(1).expand(B, H_kv, 9)),
    value_error(
        "block_table must give new tokens different places, got row 0 of page 1 twice",
        block_table=tensor(1, 1)[:, None], cache_seqlens=tensor(1, 1),
        k=rand(B, H_kv, 1, D), v=rand(B, H_kv, 1, D_v),
    ),
]  # fmt: skip
QUANTIZE = [
    type_error("k must be float16, ..., got torch.int8", k=bytes_(B, H_kv, 2, D)),
    type_error("v must be a tensor, got NoneType", v=None),
    type_error("k and v must share a dtype", v=rand(B, H_kv, 2, D_v).half()),
    value_error("k must be (B, H_kv, N, width), got shape (2, 8)", k=rand(2, D)),
    value_error("k and v must be (B, H_kv, N, D) and", v=rand(B, H_kv, 3, D_v)),
    value_error("widths of at least 1", k=rand(B, H_kv, 2, 0)),
    value_error("v must be finite", v=-rand(B, H_kv, 2, D_v) / 0),
    value_error("k must be finite, and its scale too in float32, got ... 1e+300 at (0, 0, 0)",
                k=torch.full((B, H_kv, 2, D), 1e300, dtype=torch.float64),
                v=rand(B, H_kv, 2, D_v).double()),
]  # fmt: skip
WEIGHTS = [
    type_error("rows must be integers, got [0.5]", rows=[0.5]),
    type_error("rows must be integers, got torch.bool", rows=bools(M)),
    type_error("rows must be integers, got 3", rows=3),
    value_error("rows must be (R,), got", rows=ints(1, 1)),
    value_error("rows must be from -3 to 2, got 3", rows=[0, M]),
    value_error("rows must be from -3 to 2, got 118", rows=[1 << 70]),
    value_error("rows must be from -3 to 2, got -4", rows=torch.tensor([-M - 1])),
    value_error("rows is on meta", rows=meta(1, dtype=torch.int64)),
    value_error("scale must have one element", scale=torch.ones(2)),
    value_error("sinks must be (H_q,) = (4,)", sinks=torch.ones(3)),
    value_error("q_ids must be (batch, length)", mask=segments(ints(B, 9), ints(B, N))),
]
ROWS = {
    "attention": ATTENTION,
    "attention_varlen": VARLEN,
    "attention_varlen, paged": PAGED_VARLEN,
    "attention_decode": DECODE,
    "attention_decode, paged": PAGED_DECODE,
    "attention_decode, int8": DECODE_INT8,
    "quantize_cache": QUANTIZE,
    "append_to_cache, int8": APPEND_INT8,
    "append_to_cache": APPEND,
    "attention_weights": WEIGHTS,
}
