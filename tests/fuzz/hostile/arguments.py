"""Small valid calls of the public functions, of the constructors of masks and biases, and of the
dispatcher operators, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import dtypes_of, operators_of
from tests.support.operators import operator_arguments
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.masks import block_patterns
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.problem.types import accumulate_dtype
from transformer_kernels.scores.options import DIFFERENTIABLE

Arguments = dict[str, Any]
B, H, D = 2, 4, 8
PAGE = 16


@dataclass(frozen=True)
class Variant:
    """Sizes, dtype and options of the calls of one variant."""

    M: int = 5
    N: int = 7
    H_kv: int = H
    dtype: torch.dtype = torch.float32
    needs_grad: bool = False
    with_options: bool = False

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype).requires_grad_(self.needs_grad)


VARIANTS = (
    Variant(),
    Variant(with_options=True),
    Variant(needs_grad=True),
    Variant(needs_grad=True, with_options=True, H_kv=2),
    Variant(M=1, H_kv=2, dtype=torch.bfloat16),
    Variant(M=30, N=33, with_options=True),
    Variant(M=30, N=70, needs_grad=True, dtype=torch.float16),
    Variant(M=5, N=0, dtype=torch.float64, with_options=True),
)


@dataclass(frozen=True)
class Function:
    call: Callable[..., object]
    arguments: Callable[[Variant, str], Arguments]
    """Returns all arguments by name, for a backend. Each is valid."""
    optional: tuple[str, ...] = ()
    """Arguments that are given only in variants with options."""

    def given(self, variant: Variant, backend: str) -> tuple[Arguments, Arguments]:
        """Returns all arguments, and those that a call of the variant has."""
        torch.manual_seed(0)
        if variant.dtype not in dtypes_of(backend):
            variant = replace(variant, dtype=torch.float32)
        every = self.arguments(variant, backend)
        left_out = () if variant.with_options else self.optional
        return every, {name: value for name, value in every.items() if name not in left_out}


SCORES = (
    *("mask", "bias", "relative", "scale", "softcap", "dropout_p", "seed", "sinks"),
    *("return_lse", "max_seqlen_q", "max_seqlen_k"),
)
NOT_FAST = tuple(name for name in SCORES if name not in ("mask", "scale"))
"""Options that the fast path of CPUs does not support."""


def scores(variant: Variant, bias: object, mask: Mask) -> Arguments:
    align: Align = bias.align if isinstance(bias, tk.Alibi) else "top_left"
    relative = tk.relative_bias(variant.tensor(H, 9), lowest=-4, align=align)
    return {
        "mask": mask, "bias": bias, "relative": relative, "scale": 0.3, "softcap": 5.0,
        "dropout_p": 0.25, "seed": torch.tensor(3), "sinks": variant.tensor(H), "return_lse": True,
    }  # fmt: skip


def with_keys(make: Callable[[Variant, str], Arguments]) -> Callable[[Variant, str], Arguments]:
    """The calls of `make` with relative keys and a table in place of a table."""

    def arguments(variant: Variant, backend: str) -> Arguments:
        every = make(variant, backend)
        table, align = every["relative"].table, every["relative"].align
        keys = torch.randn(H, 9, D, requires_grad=table.requires_grad)
        every["relative"] = tk.relative_keys(keys, table=table, lowest=-4, align=align)
        return every

    return arguments


def qkv(variant: Variant) -> Arguments:
    M, N, H_kv = variant.M, variant.N, variant.H_kv
    return {
        "q": variant.tensor(B, H, M, D),
        "k": variant.tensor(B, H_kv, N, D),
        "v": variant.tensor(B, H_kv, N, D),
    }


def attention(variant: Variant, backend: str) -> Arguments:
    options = scores(variant, variant.tensor(variant.M, variant.N), tk.Mask.causal())
    return {**qkv(variant), **options, "backend": backend}


def attention_varlen(variant: Variant, backend: str) -> Arguments:
    M, N, H_kv = variant.M, variant.N, variant.H_kv
    q, k, v = (variant.tensor(*shape, D) for shape in ((M, H), (N, H_kv), (N, H_kv)))
    return {
        "q": q, "k": k, "v": v,
        "cu_seqlens_q": torch.tensor([0, M // 2, M]), "cu_seqlens_k": torch.tensor([0, N // 2, N]),
        "max_seqlen_q": M, "max_seqlen_k": N,
        **scores(variant, tk.alibi(torch.ones(H)), tk.Mask.causal()), "backend": backend,
    }  # fmt: skip


def paged_varlen(variant: Variant, backend: str) -> Arguments:
    every, N = attention_varlen(variant, backend), variant.N
    pages = -(-N // PAGE) + 1
    for name in ("k", "v"):
        every[name] = variant.tensor(2 * pages, variant.H_kv, PAGE, D)
    return every | {"block_table": torch.randperm(2 * pages).reshape(2, pages)}


def cache(variant: Variant, *, paged: bool) -> Arguments:
    capacity, H_kv = -(-max(variant.M, variant.N) // PAGE) * PAGE, variant.H_kv
    pages = B * capacity // PAGE
    shape = (pages, H_kv, PAGE, D) if paged else (B, H_kv, capacity, D)
    every: Arguments = {
        "k_cache": torch.randn(shape, dtype=variant.dtype),
        "v_cache": torch.randn(shape, dtype=variant.dtype),
        "cache_seqlens": torch.tensor([variant.M, capacity]),
    }
    table = torch.randperm(pages, dtype=torch.int32).reshape(B, -1)
    return every | ({"block_table": table} if paged else {})


def attention_decode(variant: Variant, backend: str, *, paged: bool = False) -> Arguments:
    bias = tk.alibi(torch.ones(H), align="bottom_right")
    padding = tk.Mask.key_range(torch.zeros(B).long(), torch.full((B,), variant.N))
    options = scores(variant, bias, tk.Mask.window(9, 0, align="bottom_right") & padding)
    del options["dropout_p"], options["seed"]
    table = tk.relative_bias(torch.ones(H, 9), lowest=-4, align="bottom_right")
    options |= {"sinks": torch.ones(H), "relative": table}
    q = torch.randn(B, H, variant.M, D, dtype=variant.dtype)
    return {"q": q, **cache(variant, paged=paged), **options, "backend": backend}


def int8(make: Callable[..., Arguments]) -> Callable[[Variant, str], Arguments]:
    def arguments(variant: Variant, backend: str) -> Arguments:
        every = make(variant, backend)
        given = tk.quantize_cache(every["k_cache"], every["v_cache"])
        scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
        return every | {"k_cache": given.k, "v_cache": given.v} | scales

    return arguments


def append_to_cache(variant: Variant, backend: str, *, paged: bool = False) -> Arguments:
    shape = (B, variant.H_kv, variant.M, D)
    new = {name: torch.randn(shape, dtype=variant.dtype) for name in "kv"}
    return {**cache(variant, paged=paged), **new}


def drop_in(variant: Variant, backend: str) -> Arguments:
    q, k, v = qkv(variant).values()
    return {
        "query": q, "key": k, "value": v,
        "attn_mask": torch.ones(variant.M, variant.N, dtype=torch.bool),
        "dropout_p": 0.0 if variant.needs_grad else 0.25,
        "is_causal": True, "scale": 0.3, "enable_gqa": True,
    }  # fmt: skip


def paged(make: Callable[..., Arguments]) -> Callable[[Variant, str], Arguments]:
    return lambda variant, backend: make(variant, backend, paged=True)


PUBLIC = {
    "attention": Function(tk.attention, attention, SCORES),
    "attention, mask": Function(tk.attention, attention, NOT_FAST),
    "attention, keys": Function(tk.attention, with_keys(attention), SCORES),
    "attention_varlen, keys": Function(tk.attention_varlen, with_keys(attention_varlen), SCORES),
    "attention_decode, keys": Function(tk.attention_decode, with_keys(attention_decode), SCORES),
    "attention_varlen": Function(tk.attention_varlen, attention_varlen, SCORES),
    "attention_varlen, paged": Function(tk.attention_varlen, paged_varlen, SCORES),
    "attention_decode": Function(tk.attention_decode, attention_decode, SCORES),
    "attention_decode, mask": Function(tk.attention_decode, attention_decode, NOT_FAST),
    "attention_decode, paged": Function(tk.attention_decode, paged(attention_decode), SCORES),
    "attention_decode, int8": Function(tk.attention_decode, int8(attention_decode), NOT_FAST),
    "append_to_cache": Function(tk.append_to_cache, append_to_cache),
    "append_to_cache, int8": Function(tk.append_to_cache, int8(append_to_cache)),
    "append_to_cache, paged": Function(tk.append_to_cache, paged(append_to_cache)),
    "explain": Function(tk.explain, attention, SCORES),
    "scaled_dot_product_attention": Function(
        tk.scaled_dot_product_attention, drop_in, ("attn_mask", "dropout_p", "is_causal", "scale")
    ),
    "alibi_slopes": Function(tk.alibi_slopes, lambda variant, backend: {"heads": H}),
}


Make = Callable[[Variant], Arguments]
"""Returns the arguments of a constructor."""
LENGTHS = torch.tensor([3, 5])
BLOCK = 4


def constructor(make: Callable[..., Mask], arguments: Make) -> Function:
    """Builds a mask, shows it, attends under it, and once more under its intersection with another
    mask of every kind."""

    def call(_attention: Arguments, _others: Mask, **given: Any) -> object:
        mask = make(**given)
        M, N = _attention["q"].shape[2], _attention["k"].shape[2]
        assert mask.materialize(B, H, M, N).shape == (B, H, M, N)
        mask.show(M, N)
        tk.attention(**_attention, mask=mask & _others)
        return tk.attention(**_attention, mask=mask)

    return Function(
        call,
        lambda variant, backend: {
            **arguments(variant),
            "_others": all_kinds(variant),
            "_attention": on(variant, backend),
        },
    )


def pattern(name: str, **sizes: int) -> Function:
    def mask(**given: int) -> Mask:
        return Mask.block_sparse(getattr(block_patterns, name)(**given), BLOCK)

    under = constructor(mask, lambda v: {"rows": count(v.M), "columns": count(v.N), **sizes})
    # Patterns have at least one column.
    return replace(under, arguments=lambda v, b: under.arguments(replace(v, N=v.N or 1), b))


def count(length: int) -> int:
    return -(-length // BLOCK)


def blocks(variant: Variant) -> Tensor:
    return torch.ones(1, count(variant.M), count(variant.N), dtype=torch.bool)


def ids(variant: Variant) -> Arguments:
    q_ids = torch.arange(B * variant.M).reshape(B, -1) // 3
    return {"q_ids": q_ids, "k_ids": torch.zeros(B, variant.N, dtype=torch.int32)}


def positions(variant: Variant) -> Arguments:
    q_pos = torch.arange(H * variant.M).reshape(1, H, -1)
    return {"q_pos": q_pos, "k_pos": torch.arange(variant.N)[None], "left": 3, "right": None}


def attn_mask(variant: Variant) -> Tensor:
    return torch.rand(B, 1, variant.M, variant.N) > 0.5


def all_kinds(variant: Variant) -> Mask:
    return (
        Mask.causal()
        & Mask.padding(LENGTHS)
        & Mask.segments(**ids(variant))
        & Mask.positions(**positions(variant))
        & Mask.dense(attn_mask(variant))
        & Mask.block_sparse(blocks(variant), BLOCK)
    )


def option(name: str, make: Callable[..., object], arguments: Make) -> Function:
    """Makes a bias or the like, and attends with it."""

    def call(_attention: Arguments, **given: Any) -> object:
        options: Arguments = {**_attention, name: make(**given)}
        return tk.attention(**options)

    return Function(call, lambda v, backend: {**arguments(v), "_attention": on(v, backend)})


def on(variant: Variant, backend: str) -> Arguments:
    return {**qkv(variant), "backend": backend}


SHOWN = Mask.window(2, 1) & Mask.padding(LENGTHS)

CONSTRUCTORS = {
    "Mask": constructor(Mask, lambda v: {"constraints": Mask.causal().constraints}),
    "Mask.window": constructor(Mask.window, lambda v: {"left": 2, "right": 1, "align": "top_left"}),
    "Mask.causal": constructor(Mask.causal, lambda v: {"align": "bottom_right"}),
    "Mask.padding": constructor(Mask.padding, lambda v: {"key_lengths": LENGTHS}),
    "Mask.key_range": constructor(Mask.key_range, lambda v: {"start": LENGTHS - 2, "end": LENGTHS}),
    "Mask.segments": constructor(Mask.segments, lambda v: {**ids(v), "equal": False}),
    "Mask.positions": constructor(Mask.positions, positions),
    "Mask.dense": constructor(Mask.dense, lambda v: {"attn_mask": attn_mask(v)}),
    "Mask.block_sparse": constructor(
        Mask.block_sparse, lambda v: {"blocks": blocks(v), "block_size": BLOCK}
    ),
    "block_patterns.local": pattern("local", width=2),
    "block_patterns.strided": pattern("strided", stride=2),
    "block_patterns.fixed": pattern("fixed", stride=2, summaries=1),
    "Mask.materialize": Function(
        SHOWN.materialize, lambda v, backend: {"B": B, "H": H, "M": 5, "N": 7, "device": "cpu"}
    ),
    "Mask.show": Function(SHOWN.show, lambda v, backend: {"M": 5, "N": 7, "batch": 1, "head": 0}),
    "Mask.to": Function(SHOWN.to, lambda v, backend: {"device": "cpu"}),
    "alibi": option("bias", tk.alibi, lambda v: {"slopes": torch.ones(H), "align": "top_left"}),
    "relative_bias": option(
        "relative", tk.relative_bias,
        lambda v: {"table": v.tensor(H, 9), "lowest": -4, "align": "top_left"},
    ),
    "relative_keys": option(
        "relative", tk.relative_keys,
        lambda v: {
            "keys": v.tensor(H, 9, D), "table": v.tensor(H, 9), "lowest": -4, "align": "top_left"
        },
    ),
}  # fmt: skip


_NUMBERS = tuple(field.name for field in FIELDS if field.kind != "Tensor?")
_WANTED = tuple(f"{name}_needs_grad" for name in DIFFERENTIABLE)
SCALAR_ARGUMENTS = (*_NUMBERS, *_WANTED, "deterministic")


def run(operator: str, _backend: str, **arguments: Any) -> Any:
    """Runs an operator as compiled code does. Its arguments are in the order of the schema."""
    if _backend == "triton":
        return getattr(triton_operators, operator)(*arguments.values())
    return getattr(operators_of(_backend), f"attention_{operator}")(*arguments.values())


def options(variant: Variant) -> Arguments:
    M, N = variant.M, variant.N
    return {
        "bias": torch.randn(1, H, M, N, dtype=variant.dtype),
        "alibi_slopes": slopes(variant),
        "relative_bias": table(variant, M, N),
        "relative_keys": keys(variant, M, N),
        "seed": torch.tensor(3), "dropout_p": 0.25,
        "key_start": torch.tensor([0, 1]), "key_end": torch.tensor([3, 5]),
        "q_low": torch.zeros(1, B, 1, M, dtype=torch.int64),
        "q_high": torch.zeros(1, B, 1, M, dtype=torch.int64),
        "k_position": torch.zeros(1, B, 1, N, dtype=torch.int64),
        "dense": torch.ones(B, 1, M, N, dtype=torch.bool),
        "blocks": torch.ones(1, -(-M // 4), -(-N // 4), dtype=torch.bool), "block_size": 4,
    }  # fmt: skip


def slopes(variant: Variant) -> Tensor:
    return torch.ones(1, H, dtype=accumulate_dtype(variant.dtype))


def table(variant: Variant, M: int, N: int) -> Tensor:
    """A relative bias of all distances."""
    return slopes(variant).mT.expand(-1, max(M + N - 1, 0))


def keys(variant: Variant, M: int, N: int) -> Tensor:
    return torch.ones(H, max(M + N - 1, 0), D, dtype=variant.dtype)


def forward(variant: Variant, backend: str) -> Arguments:
    q, k, v = (x.detach() for x in qkv(variant).values())
    given = options(variant) if variant.with_options else {}
    return operator_arguments(q, k, v, **given) | {"_backend": backend}


def packed(variant: Variant, backend: str) -> Arguments:
    q, k, v = (x.detach()[:1] for x in qkv(variant).values())
    M, N = variant.M, variant.N
    arguments = operator_arguments(
        q, k, v,
        alibi_slopes=slopes(variant),
        relative_bias=table(variant, M, N), relative_keys=keys(variant, M, N),
        cu_seqlens_q=torch.tensor([0, M // 2, M], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, N // 2, N], dtype=torch.int32),
    )  # fmt: skip
    return arguments | {"_backend": backend}


def backward(variant: Variant, backend: str) -> Arguments:
    given = forward(variant, backend)
    o, row_stats, block_mask = run("forward", **given)
    q, k, v = (given.pop(name) for name in "qkv")
    wanted = dict.fromkeys(_WANTED, variant.with_options) | {"deterministic": False}
    saved = {"q": q, "k": k, "v": v, "o": o, "row_stats": row_stats, "block_mask": block_mask}
    return {"do": o.clone(), "dlse": row_stats[0].clone(), **saved, **given, **wanted}


def decode(variant: Variant, backend: str) -> Arguments:
    given = cache(variant, paged=variant.with_options)
    q = torch.randn(B, H, variant.M, D, dtype=variant.dtype)
    arguments = operator_arguments(
        q, given["k_cache"], given["v_cache"],
        scale=0.3, alibi_slopes=slopes(variant),
        diagonal_low=-9, diagonal_high=0, bottom_right=True,
        cache_seqlens=given["cache_seqlens"].int(), block_table=given.get("block_table"),
    )  # fmt: skip
    return arguments | {"_backend": backend}


OPERATORS = {
    "operator forward": Function(partial(run, "forward"), forward),
    "operator forward, packed": Function(partial(run, "forward"), packed),
    "operator backward": Function(partial(run, "backward"), backward),
    "operator forward, cache": Function(partial(run, "forward"), decode),
}

FUNCTIONS = {**PUBLIC, **CONSTRUCTORS, **OPERATORS}
