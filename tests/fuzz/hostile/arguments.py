"""Small valid calls of the public functions, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import dtypes_of
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

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
    """A function under test."""

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
    "return_lse",
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
    return {
        "q": variant.tensor(M, H, D),
        "k": variant.tensor(N, H_kv, D),
        "v": variant.tensor(N, H_kv, D),
        "cu_seqlens_q": torch.tensor([0, M // 2, M]),
        "cu_seqlens_k": torch.tensor([0, N // 2, N]),
        "max_seqlen_q": M,
        "max_seqlen_k": N,
        **scores(variant, tk.alibi(torch.ones(H)), tk.Mask.causal()),
        "backend": backend,
    }


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
    options["sinks"] = torch.ones(H)
    options["relative"] = tk.relative_bias(torch.ones(H, 9), lowest=-4, align="bottom_right")
    q = torch.randn(B, H, variant.M, D, dtype=variant.dtype)
    return {"q": q, **cache(variant, paged=paged), **options, "backend": backend}


def append_to_cache(variant: Variant, backend: str, *, paged: bool = False) -> Arguments:
    shape = (B, variant.H_kv, variant.M, D)
    new = {name: torch.randn(shape, dtype=variant.dtype) for name in "kv"}
    return {**cache(variant, paged=paged), **new}


def drop_in(variant: Variant, backend: str) -> Arguments:
    names = zip(("query", "key", "value"), qkv(variant).values(), strict=True)
    return {
        **dict(names),
        "attn_mask": torch.ones(variant.M, variant.N, dtype=torch.bool),
        "dropout_p": 0.0 if variant.needs_grad else 0.25,
        "is_causal": True,
        "scale": 0.3,
        "enable_gqa": True,
    }


def paged(make: Callable[..., Arguments]) -> Callable[[Variant, str], Arguments]:
    return lambda variant, backend: make(variant, backend, paged=True)


FUNCTIONS = {
    "attention": Function(tk.attention, attention, SCORES),
    "attention, mask": Function(tk.attention, attention, NOT_FAST),
    "attention, keys": Function(tk.attention, with_keys(attention), SCORES),
    "attention_varlen, keys": Function(
        tk.attention_varlen, with_keys(attention_varlen), (*SCORES, "max_seqlen_q", "max_seqlen_k")
    ),
    "attention_decode, keys": Function(tk.attention_decode, with_keys(attention_decode), SCORES),
    "attention_varlen": Function(
        tk.attention_varlen, attention_varlen, (*SCORES, "max_seqlen_q", "max_seqlen_k")
    ),
    "attention_varlen, paged": Function(
        tk.attention_varlen, paged_varlen, (*SCORES, "max_seqlen_q", "max_seqlen_k")
    ),
    "attention_decode": Function(tk.attention_decode, attention_decode, SCORES),
    "attention_decode, mask": Function(tk.attention_decode, attention_decode, NOT_FAST),
    "attention_decode, paged": Function(tk.attention_decode, paged(attention_decode), SCORES),
    "append_to_cache": Function(tk.append_to_cache, append_to_cache),
    "append_to_cache, paged": Function(tk.append_to_cache, paged(append_to_cache)),
    "explain": Function(tk.explain, attention, SCORES),
    "scaled_dot_product_attention": Function(
        tk.scaled_dot_product_attention, drop_in, ("attn_mask", "dropout_p", "is_causal", "scale")
    ),
    "alibi_slopes": Function(tk.alibi_slopes, lambda variant, backend: {"heads": H}),
}
