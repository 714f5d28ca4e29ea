"""Bad arguments of linear attention, of the gated delta rule, of the adapter for xFormers, and of
the constructors of masks and biases."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, rand

import transformer_kernels as tk
from tests.hostile.bad_arguments import (
    BLOCK_MASK,
    CAUSAL,
    DENSE,
    HUGE,
    KEYS,
    NEW,
    ROWS_OF_PACKED,
    STARTS,
    TABLE,
    B,
    D,
    D_v,
    H_kv,
    H_q,
    M,
    Mask,
    N,
    Valid,
    alibi,
    bools,
    ints,
    meta,
    relative_bias,
    relative_keys,
    type_error,
    value_error,
)  # fmt: skip
from transformer_kernels.integrations.xformers import fmha
from transformer_kernels.masks.block_patterns import fixed, local, strided

xformers: Any = fmha

X, TABLES = rand(1, 5, 4, 8), torch.tensor([[0, 1], [2, 9]])
CacheMask = xformers.attn_bias.BlockDiagonalPaddedKeysMask
PagedMask = xformers.attn_bias.PagedBlockDiagonalPaddedKeysMask
BIAS = xformers.BlockDiagonalMask.from_seqlens([2, 3], device="cpu")
CACHED = CacheMask.from_seqlens([2, 3], 3, [2, 3], device="cpu")
STATE = tk.LinearState(torch.zeros(B, H_kv, D, D_v), torch.zeros(B, H_kv, D))
H_v = 2 * H_kv
DELTA = {
    "q": rand(B, H_kv, N, D), "k": rand(B, H_kv, N, D), "v": rand(B, H_v, N, D_v),
    "log_decay": torch.zeros(B, H_v, N), "beta": torch.ones(B, H_v, N),
}  # fmt: skip
VALID: Valid = {
    "linear_attention": (
        tk.linear_attention,
        {
            **DENSE, "q": rand(B, H_q, N, D), "v": rand(B, H_kv, N, D_v),
            "log_decay": torch.zeros(H_kv),
        },
    ),
    "linear_attention_varlen": (
        tk.linear_attention_varlen, {**ROWS_OF_PACKED, "cu_seqlens": STARTS},
    ),
    "linear_attention_decode": (
        tk.linear_attention_decode, {"q": rand(B, H_q, 2, D), **NEW, "state": STATE},
    ),
    "gated_delta_rule": (tk.gated_delta_rule, DELTA),
    "gated_delta_rule_varlen": (
        tk.gated_delta_rule_varlen,
        {
            **{name: x[0].transpose(0, 1) for name, x in DELTA.items()},
            "cu_seqlens": torch.tensor([0, 2, 4]),
        },
    ),
    "gated_delta_rule_step": (
        tk.gated_delta_rule_step, {**DELTA, "state": torch.zeros(B, H_v, D, D_v)},
    ),
    "causal_conv1d": (
        tk.causal_conv1d,
        {
            "x": rand(1, 5, 9), "weight": rand(5, 4), "bias": rand(5),
            "initial_state": rand(2, 5, 3), "cu_seqlens": STARTS,
        },
    ),
    "causal_conv1d_step": (
        tk.causal_conv1d_step,
        {"x": rand(2, 5), "weight": rand(5, 4), "bias": rand(5), "state": rand(2, 5, 3)},
    ),
    "memory_efficient_attention": (
        xformers.memory_efficient_attention,
        {"query": X, "key": X, "value": X, "attn_bias": torch.ones(5, 5)},
    ),
    "BlockDiagonalMask.from_seqlens": (
        xformers.BlockDiagonalMask.from_seqlens, {"q_seqlen": [2, 3], "kv_seqlen": [1, 4]},
    ),
    "BlockDiagonalPaddedKeysMask.from_seqlens": (
        CacheMask.from_seqlens, {"q_seqlen": [2, 3], "kv_padding": 4, "kv_seqlen": [1, 4]},
    ),
    "BlockDiagonalPaddedKeysMask.make_paged": (
        CACHED.make_paged, {"block_tables": TABLES, "page_size": 2, "paged_type": PagedMask},
    ),
    "BlockDiagonalMask.make_local_attention": (BIAS.make_local_attention, {"window_size": 1}),
    "LocalAttentionFromBottomRightMask": (
        xformers.attn_bias.LocalAttentionFromBottomRightMask,
        {"window_left": 0, "window_right": 0},
    ),
    "BlockDiagonalMask.materialize": (BIAS.materialize, {"shape": (5, 5)}),
    "Mask": (Mask, {"constraints": CAUSAL.constraints}),
    "Mask.window": (Mask.window, {}),
    "Mask.causal": (Mask.causal, {}),
    "Mask.padding": (Mask.padding, {"key_lengths": ints(B)}),
    "Mask.key_range": (Mask.key_range, {"start": ints(B), "end": ints(B)}),
    "Mask.segments": (Mask.segments, {"q_ids": ints(B, M), "k_ids": ints(B, N)}),
    "Mask.positions": (Mask.positions, {"q_pos": ints(B, M), "k_pos": ints(B, N)}),
    "Mask.intervals": (
        Mask.intervals,
        {"low": ints(B, M), "high": ints(B, M), "k_pos": ints(B, N)},
    ),
    "Mask.prefix_lm": (Mask.prefix_lm, {"prefix_lengths": ints(B), "length": N}),
    "Mask.blocks": (Mask.blocks, {"ids": ints(B, N)}),
    "Mask.shared_prefix": (Mask.shared_prefix, {"ids": ints(B, N)}),
    "Mask.global_window": (Mask.global_window, {"length": N, "tokens": 1, "window": 2}),
    "Mask.block_diffusion": (Mask.block_diffusion, {"length": N, "block": 2}),
    "Mask.dense": (Mask.dense, {"attn_mask": bools(M, N)}),
    "Mask.block_sparse": (Mask.block_sparse, {"blocks": bools(2, 3), "block_size": 2}),
    "Mask.selected": (Mask.selected, {"indices": ints(B, M, 2), "block_size": 2}),
    "Mask.from_block_mask": (Mask.from_block_mask, {"block_mask": BLOCK_MASK}),
    "Mask.materialize": (CAUSAL.materialize, {"B": 1, "H": 1, "M": 1, "N": 1}),
    "Mask.show": (lambda mask=CAUSAL, **given: mask.show(**given), {"M": 3}),
    "Mask.sliced": (Mask.segments(ints(1, M), ints(1, N)).sliced, {"M": M, "N": N}),
    "Mask.to": (lambda mask=CAUSAL, **given: mask.to(**given), {"device": "cpu"}),
    "alibi": (alibi, {"slopes": torch.ones(H_q)}),
    "alibi_slopes": (tk.alibi_slopes, {"heads": 8}),
    "relative_bias": (relative_bias, {"table": torch.ones(H_q, 3), "lowest": 0}),
    "relative_keys": (
        relative_keys,
        {"keys": torch.ones(H_q, 3, D), "table": torch.ones(H_q, 3), "lowest": 0},
    ),
    "local": (local, {"rows": 4, "columns": 4, "width": 1}),
    "strided": (strided, {"rows": 4, "columns": 4, "stride": 2}),
    "fixed": (fixed, {"rows": 4, "columns": 4, "stride": 2, "summaries": 1}),
}  # fmt: skip
MAPS = "feature_map must be 'elu', 'relu', 'identity' or a callable"
ZEROS = torch.zeros(B, H_kv, D)
LINEAR = [
    value_error(MAPS, feature_map="gelu"),
    value_error(MAPS, feature_map=3),
    value_error("feature_map must return a tensor with all dimensions", feature_map=lambda x: x[0]),
    value_error("eps must be greater than 0, got 0.0", eps=0),
    value_error("eps must be greater than 0", eps=-1),
    value_error("eps must be finite", eps=math.nan),
    type_error("causal must be True or False, got 1", causal=1),
    type_error("normalize must be True or False", normalize=None),
    type_error("return_state must be True or False", return_state=1),
    value_error("5 and 6", k=rand(B, H_kv, 6, D), v=rand(B, H_kv, 6, D_v)),
    value_error("positive multiple", k=rand(B, 3, N, D), v=rand(B, 3, N, D_v)),
    type_error("share a dtype", v=rand(B, H_kv, N, D_v).double()),
    value_error("only Mask.padding and Mask.key_range", mask=CAUSAL),
    type_error("mask must be a Mask or None", mask=bools(B, N)),
    value_error("must be (batch,) = (2,)", mask=Mask.padding(ints(3))),
    type_error("log_decay must be", log_decay=0.5),
    value_error("log_decay must have one number for each key head", log_decay=rand(3)),
    type_error("log_decay must be float32, got torch.float64", log_decay=rand(2).double()),
    value_error("log_decay requires causal=True", causal=False),
    type_error("initial_state must be a LinearState", initial_state=3),
    value_error("initial_state.S must", initial_state=(rand(B, H_kv, D, D_v + 1), ZEROS)),
    value_error("initial_state.z must be", initial_state=(rand(B, H_kv, D, D_v), ZEROS[0])),
    value_error("backend must be one of 'auto', 'cpu'..., 'reference'", backend="fast"),
]
LINEAR_VARLEN = [
    value_error("cu_seqlens must start at 0, got 1", cu_seqlens=STARTS + 1),
    value_error(
        "cu_seqlens must not decrease, got 9, then 5 at 2", cu_seqlens=torch.tensor([0, 9, 5])
    ),
    value_error("cu_seqlens must end within the 9 rows of q, got 18", cu_seqlens=STARTS * 2),
    value_error("cu_seqlens must be (B + 1,)", cu_seqlens=STARTS[None]),
    type_error("cu_seqlens must be int32 or int64", cu_seqlens=STARTS.float()),
]
LINEAR_DECODE = [
    type_error("state must be a LinearState", state=None),
    value_error("state.S must be contiguous", state=(rand(B, H_kv, D_v, D).mT, ZEROS)),
    type_error("must be float32", state=(rand(B, H_kv, D, D_v).double(), ZEROS)),
    value_error("because linear_attention_decode has no", q=rand(B, H_q, 2, D).requires_grad_()),
    value_error("as many queries as keys", q=rand(B, H_q, 1, D)),
    value_error("eps must be greater than 0", eps=-1),
]
_DELTA = [
    type_error("q must be", q=None),
    type_error("share a dtype", v=rand(B, H_v, N, D_v).double()),
    value_error("q must be (batch, heads, length, width)", q=rand(H_kv, N, D)),
    value_error("q and k must have the same shape", k=rand(B, H_kv, N, D + 1)),
    value_error("share the batch size and the length", v=rand(B, H_v, N + 1, D_v)),
    value_error("v's heads must be a positive multiple of k's", v=rand(B, H_v + 1, N, D_v)),
    value_error("D and D_v must be at least 1", v=rand(B, H_v, N, 0)),
    type_error("log_decay must be a tensor, got float", log_decay=0.5),
    type_error("log_decay must be float32, got torch.float64", log_decay=rand(B, H_v, N).double()),
    value_error("log_decay must be (2, 4, 5) or", log_decay=rand(B, H_v, N + 1)),
    value_error("log_decay must be (2, 4, 5) or", log_decay=rand(B, H_v, N, D + 1)),
    value_error("log_decay must be at most 0, ..., got 2", log_decay=torch.full((B, H_v, N), 2.0)),
    type_error("beta must be a tensor, got NoneType", beta=None),
    type_error("beta must be float32, got torch.float16", beta=rand(B, H_v, N).half()),
    value_error("beta must be (2, 4, 5), got shape (2, 4)", beta=rand(B, H_v)),
    value_error("beta is on meta, q is on cpu", beta=torch.ones(B, H_v, N, device="meta")),
    value_error("scale must be finite", scale=math.inf),
    type_error("scale must be a number", scale="1"),
    type_error("l2norm must be True or False, got 1", l2norm=1),
    value_error("backend must be one of 'auto', 'cpu'..., 'triton'", backend="cuda"),
]
DELTA_RULE = [
    *_DELTA,
    type_error("return_state must be True or False", return_state=1),
    type_error("initial_state must be a tensor, got int", initial_state=3),
    type_error("initial_state must be float32", initial_state=rand(B, H_v, D, D_v).half()),
    value_error("initial_state must be (2, 4, ", initial_state=rand(B, H_v, D, D_v + 1)),
]
DELTA_VARLEN = [
    value_error("cu_seqlens must start at 0, got 1", cu_seqlens=torch.tensor([1, 4])),
    value_error("cu_seqlens must end within the 5 rows of q", cu_seqlens=torch.tensor([0, 9])),
    value_error("q must be (length, heads, width)", q=rand(B, H_kv, N, D)),
    value_error("beta must be (5, 4), got", beta=rand(H_v, N)),
    value_error("log_decay must be at most 0", log_decay=torch.ones(N, H_v)),
    value_error("initial_state must be (2, 4, ", initial_state=rand(B, H_kv, D, D_v)),
]
DELTA_STEP = [
    *_DELTA,
    type_error("state must be a tensor, got None", state=None),
    value_error("state must be (2, 4, ", state=rand(B, H_kv, D, D_v)),
    value_error("state must be contiguous", state=rand(B, H_v, D_v, D).mT),
    value_error("because gated_delta_rule_step has no", beta=rand(B, H_v, N).requires_grad_()),
]
CONV_DEVICE = "is on meta, x is on cpu"
CONV = [
    value_error("x must be (batch, channels, length), got shape (5, 9)", x=rand(5, 9)),
    type_error("x must be float16, bfloat16, float32 or float64", x=ints(1, 5, 9)),
    value_error("x must have one batch entry with cu_seqlens, got 2", x=rand(2, 5, 9)),
    value_error("weight must be (C, W) with C = 5 and W from 2 to 8, got", weight=rand(5, 1, 4)),
    *(
        value_error("C = 5 and W from 2 to 8", weight=rand(*size))
        for size in ((5, 1), (5, 9), (4, 4))
    ),
    type_error("weight must be float32, got torch.float64", weight=rand(5, 4).double()),
    type_error("weight must be float32, got torch.bfloat16", weight=rand(5, 4).bfloat16()),
    value_error(f"weight {CONV_DEVICE}", weight=meta(5, 4)),
    value_error("bias must be (5,), got shape (4,)", bias=rand(4)),
    type_error("bias must be float32", bias=rand(5).double()),
    value_error(f"bias {CONV_DEVICE}", bias=meta(5)),
    value_error("activation must be None, 'silu' or 'swish', got 'gelu'", activation="gelu"),
    value_error("activation must be None, 'silu' or 'swish', got True", activation=True),
    value_error("initial_state must be (2, 5, 3), got", initial_state=rand(1, 5, 3)),
    type_error(
        "initial_state must be float32, got torch.float16", initial_state=rand(2, 5, 3).half()
    ),
    value_error(f"initial_state {CONV_DEVICE}", initial_state=meta(2, 5, 3)),
    type_error("return_state must be True or False", return_state=1),
    value_error("cu_seqlens must start at 0, got 1", cu_seqlens=STARTS + 1),
    value_error("cu_seqlens must end within the 9 rows of x, got 18", cu_seqlens=STARTS * 2),
    value_error("cu_seqlens must be (B + 1,)", cu_seqlens=STARTS[None]),
    value_error(f"cu_seqlens {CONV_DEVICE}", cu_seqlens=meta(3, dtype=torch.int64)),
    type_error("cu_seqlens must be int32 or int64", cu_seqlens=STARTS.float()),
    value_error("backend must be one of 'auto', 'cpu', 'reference', got 'cuda'", backend="cuda"),
]
CONV_STEP = [
    value_error("x must be (batch, channels) or (batch, channels, length)", x=rand(5)),
    type_error("state must be a tensor", state=None),
    type_error("state must be float32", state=rand(2, 5, 3).double()),
    value_error("state must be (2, 5, 3), got", state=rand(2, 5, 4)),
    value_error("state must not be expanded", state=rand(1, 5, 3).expand(2, 5, 3)),
    value_error("because causal_conv1d_step has no backward", weight=rand(5, 4).requires_grad_()),
    value_error("activation must be None, 'silu' or 'swish'", activation="relu"),
    type_error("bias must be a tensor", bias=3),
]
ALIGN = r"align must be 'top_left' or 'bottom_right', got"
DEVICE = "device must be a torch device, got"
MASKS = {
    "Mask": [
        type_error("constraints must", constraints=x)
        for x in (3, "ab", [1], (CAUSAL,), torch.ones(2))
    ],
    "Mask.window": [
        type_error("left must be an int or None, got 1.5", left=1.5),
        type_error("right must be an int or None, got True", right=True),
        value_error(f"{ALIGN} 'left'", align="left"),
        value_error("left must be at least -9223372036854775808", left=-(10**30)),
        value_error("right must be at most 9223372036854775807", right=1 << 63),
    ],
    "Mask.causal": [value_error(f"{ALIGN} None", align=None)],
    "Mask.padding": [
        type_error("key_lengths must be ...torch.float32", key_lengths=rand(2)),
        type_error("key_lengths must be a tensor ... got list", key_lengths=[1, 2]),
        type_error("key_lengths must be ...torch.bool", key_lengths=bools(2)),
        value_error("key_lengths must be ... shape (2, 2)", key_lengths=ints(2, 2)),
    ],
    "Mask.key_range": [type_error("start must be a tensor of int", start=bools(2))],
    "Mask.segments": [
        type_error("q_ids must be ...torch.float32", q_ids=rand(2, 3)),
        value_error("q_ids must be ...shape (2,)", q_ids=ints(2)),
        type_error("equal must be True or False, got 1", equal=1),
    ],
    "Mask.positions": [
        type_error("q_pos must be ...torch.bool", q_pos=bools(2, 2)),
        value_error("k_pos ...shape (2,)", k_pos=ints(2)),
        type_error("left must be an int or", left=0.5),
    ],
    "Mask.intervals": [
        type_error("high must be ...torch.bool", high=bools(2, 2)),
        value_error("low ...shape (2,)", low=ints(2)),
        value_error("low or high must be a tensor, got None for both", low=None, high=None),
        type_error("inside must be True or False, got 0", inside=0),
    ],
    "Mask.prefix_lm": [
        value_error("prefix_lengths must be (batch,)", prefix_lengths=ints(2, 2)),
        value_error("length must be at least 0, got -1", length=-1),
    ],
    "Mask.blocks": [value_error("ids must be ...shape (2,)", ids=ints(2))],
    "Mask.shared_prefix": [type_error("ids must be a tensor", ids=bools(2, 2))],
    "Mask.global_window": [
        value_error("tokens must be at least 0, got -1", tokens=-1),
        type_error("window must be an int, got 2.0", window=2.0),
        value_error("length must be at most", length=HUGE),
    ],
    "Mask.block_diffusion": [value_error("block must be at least 1, got 0", block=0)],
    "Mask.dense": [
        type_error("attn_mask must be a bool tensor, got ...torch.float32", attn_mask=rand(3, 3)),
        type_error("attn_mask must be a bool tensor, got NoneType", attn_mask=None),
        value_error("attn_mask ...got shape (1, 1, 1, 2, 2)", attn_mask=bools(1, 1, 1, 2, 2)),
    ],
    "Mask.block_sparse": [
        type_error("blocks must be a bool tensor", blocks=rand(2, 2)),
        value_error("blocks must be ... shape (2,)", blocks=bools(2)),
        value_error("block_size must be at least 1, got 0", block_size=0),
        type_error("block_size must be an int, got 2.0", block_size=2.0),
        value_error("block_size must be", block_size=HUGE),
    ],
    "Mask.selected": [
        type_error("indices must be ...torch.float32", indices=rand(1, 2, 3)),
        value_error("(batch, heads, queries, count), got shape (2, 2)", indices=ints(2, 2)),
        value_error("block_size must be at least 1, got 0", block_size=0),
        type_error("block_size must be an int, got 2.0", block_size=2.0),
    ],
    "Mask.from_block_mask": [
        type_error("block_mask must be a BlockMask, got ", block_mask=bools(3, 3))
    ],
    "Mask.materialize": [
        value_error("M must be at least 0, got -1", M=-1),
        value_error("M * N must fit in 64", M=1 << 40, N=1 << 40),
    ],
    "Mask.show": [
        value_error("M must be at most", M=HUGE),
        value_error("batch must be at least 0, got -1", batch=-1),
        value_error("must have a batch entry ... B = 0", mask=Mask.padding(ints(0))),
    ],
    "Mask.sliced": [
        type_error("rows must be a slice, got 3", rows=3),
        value_error("columns must have step 1, got 2", columns=slice(0, 4, 2)),
        value_error("q_ids must be (batch, length) = (1, 4)", M=4),
        value_error("M must be at least 0", M=-1),
    ],
    "Mask.to": [
        value_error("end is on meta", mask=Mask.padding(meta(2, dtype=torch.int64))),
        value_error("device must be ... 'gpu'", device="gpu"),
    ],
}
for name in ("Mask.materialize", "Mask.to"):
    MASKS[name] += [type_error(DEVICE, device=x) for x in (b"\xff", Tensor, True)]
    MASKS[name] += [
        value_error(DEVICE, device=x) for x in (-1, HUGE, "xla", "cuda:999", 999, "gpu")
    ]
BIASES = {
    "alibi": [
        type_error("slopes must be a floating-point tensor, got list", slopes=[0.5]),
        type_error("slopes must be a floating-point tensor", slopes=ints(2)),
        value_error("(H_q,) or (B, H_q), got shape (1, 2, ", slopes=torch.ones(1, 2, 2)),
        value_error("(H_q,) or (B, H_q), got shape ()", slopes=torch.tensor(1.0)),
        value_error(f"{ALIGN} 'right'", align="right"),
    ],
    "alibi_slopes": [
        value_error("heads must be at least 1, got 0", heads=0),
        value_error("heads must be at most", heads=HUGE),
    ],
    "relative_bias": [
        type_error("table must be ..., got list", table=[[0.5]]),
        type_error("table must be a floating", table=TABLE.long()),
        value_error("table ...E >= 1, got shape (3,)", table=TABLE[0]),
        value_error("table ...got shape (1, 4, 3)", table=TABLE[None]),
        value_error("table ...shape (4, 0)", table=TABLE[:, :0]),
        type_error("lowest must be an int, got", lowest=0.5),
        type_error("lowest must be an int, got", lowest=True),
        value_error("lowest must be at most", lowest=1 << 31),
        value_error(f"{ALIGN} 'end'", align="end"),
    ],
    "relative_keys": [
        type_error("keys must be ... got list", keys=[[[0.5]]]),
        type_error("keys must be a floating", keys=KEYS.int()),
        value_error("keys must be (H_q or 1, E, D) with E >= 1, got shape (4, 3)", keys=TABLE),
        value_error("keys ...shape (1, 4, 3, 8)", keys=KEYS[None]),
        value_error("keys ...got shape (4, 0, 8)", keys=KEYS[:, :0]),
        value_error("keys ...got shape (0, 3, 8)", keys=KEYS[:0]),
        type_error("lowest must be an int", lowest=1.0),
        value_error("lowest must be at least", lowest=-1 << 31),
        value_error(f"{ALIGN} 0", align=0),
        value_error(
            "table must have the 3 distances of keys, got shape (4, 2)", table=TABLE[:, :2]
        ),
        value_error("table must be (H_q or 1, E) with E >= 1, got shape (3,)", table=TABLE[0]),
        type_error("table must be a floating", table=TABLE.long()),
    ],
}
PATTERNS = {
    "local": [
        value_error("rows must be at least 1, got 0", rows=0),
        value_error("width must be at least 1, got -1", width=-1),
    ],
    "strided": [value_error("stride must be at least 1, got 0", stride=0)],
    "fixed": [value_error("summaries must be at most stride = 2, got 3", summaries=3)],
}
AS_QUERY = "must be (B, length, H, K), (B, length, K) or (B, length, G, H, K)"
FOUR_ROWS = {"key": X[:, :4], "value": X[:, :4]}
XFORMERS = {
    "memory_efficient_attention": [
        value_error(f"query {AS_QUERY}, ...got shape (4, 8)", query=X[0, 0]),
        value_error(f"value {AS_QUERY}, ...got shape (5, 4, 8)", value=X[0]),
        type_error("query, key and value must share a dtype, got key ...16", key=X.half()),
        value_error("query, key and value must be on one device", key=X.to("meta")),
        value_error("query and key must share the width D", key=X[..., :7]),
        value_error("query, key and value must share the batch size", key=X.expand(2, -1, -1, -1)),
        value_error("key and value must share heads and length", value=X[:, :4]),
        value_error(
            "key must have query's groups and heads, 2 and 2 (or 1), got shape (1, 5, 4, 1, 8)",
            query=X.unflatten(2, (2, 2)), key=X.unsqueeze(3), value=X.unsqueeze(3),
        ),
        type_error("attn_bias must be a tensor, a bias of ..., got list", attn_bias=[0.0]),
        *(
            type_error(f"attn_bias must ..., got {name}{rest}", attn_bias=type(name, (base,), {})())
            for name, base, rest in (
                ("BlockDiagonalGappyKeysMask", object, ""),
                ("Own", xformers.LowerTriangularMask, ""),
                ("LowerTriangularMaskWithTensorBias", object, " without _bias"),
                ("BlockDiagonalMask", object, " without q_seqinfo, k_seqinfo, _batch_sizes"),
            )
        ),
        type_error("attn_bias must be a floating-point ...bool", attn_bias=bools(5, 5)),
        type_error("attn_bias must be float32, got torch.float16", attn_bias=rand(5, 5).half()),
        value_error(
            "attn_bias must broadcast to (1, 4, 5, 5), got (4, 5)", attn_bias=rand(4, 5)
        ),
        value_error("attn_bias must broadcast to", attn_bias=rand(1, 1, 1, 5, 5)),
        value_error("attn_bias is on meta, query is on cpu", attn_bias=meta(5, 5)),
        value_error("attn_bias is on meta, query is on cpu; use attn_bias.to(query.device)",
                    attn_bias=BIAS.to("meta")),
        value_error("attn_bias has 5 rows of query, got ... 4", query=X[:, :4], attn_bias=BIAS),
        value_error("attn_bias has 5 rows of key, got key with 4", **FOUR_ROWS, attn_bias=BIAS),
        value_error(
            "attn_bias of packed sequences needs a batch size of 1, got (2, 5, 4, 8), (1, 5, 4, 8)",
            query=X.expand(2, -1, -1, -1), attn_bias=BIAS,
        ),
        value_error("key and value must share heads", value=X[:, :4], attn_bias=BIAS),
        value_error("key and value must have 6 rows for attn_bias, got 5 and 5", attn_bias=CACHED),
        value_error("key and value must have a multiple of 2 rows for attn_bias, got 5 and 5",
                    attn_bias=CACHED.make_paged(TABLES, 2, PagedMask)),
        value_error("block_table must hold pages 0 to 4 of k..., got 5 at (0, 1)",
                    attn_bias=CACHED.make_paged(torch.arange(4, 10).view(2, 3), 1, PagedMask)),
        value_error("p must be between 0 and 1, got -0.1", p=-0.1),
        type_error("p must be a number, got '0'", p="0"),
        type_error("scale must be a number", scale="1"),
        value_error("op must be None, ..., got 3", op=3),
        type_error("output_dtype must be a floating-point dtype", output_dtype=torch.int8),
    ],
    "BlockDiagonalMask.from_seqlens": [
        type_error("q_seqlen must be a list of ints, got a tensor (2,)", q_seqlen=ints(2)),
        type_error("kv_seqlen must be an int, got 1.5", kv_seqlen=[1.5, 2]),
        value_error("q_seqlen must be at least 0, got -1", q_seqlen=[-1, 2]),
        value_error("kv_seqlen must have 2 lengths, as q_seqlen, got 1", kv_seqlen=[3]),
    ],
    "BlockDiagonalPaddedKeysMask.from_seqlens": [
        value_error("kv_padding must be at least 1, got 0", kv_padding=0),
        value_error("kv_seqlen must be at most 4, got 5", kv_seqlen=[1, 5]),
    ],
    "BlockDiagonalPaddedKeysMask.make_paged": [
        value_error("page_size must be at least 1, got 0", page_size=0),
        value_error("block_tables must be ... room for 3 keys, got a tensor (2, 2)", page_size=1),
        value_error("block_tables must be (2, pages), with ...", block_tables=ints(3, 3)),
        value_error("block_tables must be (B, pages), got ... (2,)", block_tables=ints(2)),
    ],
    "BlockDiagonalMask.make_local_attention": [
        value_error("window_size must be at least 1, got 0", window_size=0)
    ],
    "LocalAttentionFromBottomRightMask": [
        value_error("window_left must be at least 0, got -1", window_left=-1)
    ],
    "BlockDiagonalMask.materialize": [
        value_error("shape must be (..., 5, 5), got (..., 4, 5)", shape=(4, 5))
    ],
}  # fmt: skip
ROWS = {
    **XFORMERS,
    "linear_attention": LINEAR,
    "linear_attention_varlen": LINEAR_VARLEN,
    "linear_attention_decode": LINEAR_DECODE,
    "gated_delta_rule": DELTA_RULE,
    "gated_delta_rule_varlen": DELTA_VARLEN,
    "gated_delta_rule_step": DELTA_STEP,
    "causal_conv1d": CONV,
    "causal_conv1d_step": CONV_STEP,
    **MASKS,
    **BIASES,
    **PATTERNS,
}
