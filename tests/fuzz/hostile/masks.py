"""Small valid calls of the constructors of masks, ALiBi, relative biases and keys, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import transformer_kernels as tk
from tests.fuzz.hostile.arguments import Arguments, B, D, Function, H, Variant, qkv
from transformer_kernels.masks import block_patterns
from transformer_kernels.masks.mask import Mask

Make = Callable[[Variant], Arguments]
LENGTHS = torch.tensor([3, 5])
BLOCK = 4


def under_mask(constructor: Callable[..., Mask]) -> Callable[..., object]:
    """Builds a mask, shows it, attends under it, and once more under its intersection with another
    mask of every kind."""

    def call(_attention: Arguments, _others: Mask, **arguments: Any) -> object:
        mask = constructor(**arguments)
        M, N = _attention["q"].shape[2], _attention["k"].shape[2]
        assert mask.materialize(B, H, M, N).shape == (B, H, M, N)
        mask.show(M, N)
        tk.attention(**_attention, mask=mask & _others)
        return tk.attention(**_attention, mask=mask)

    return call


def constructor(make: Callable[..., Mask], arguments: Make) -> Function:
    return Function(
        under_mask(make),
        lambda variant, backend: {
            **arguments(variant),
            "_others": all_kinds(variant),
            "_attention": {**qkv(variant), "backend": backend},
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


def blocks(variant: Variant) -> torch.Tensor:
    return torch.ones(1, count(variant.M), count(variant.N), dtype=torch.bool)


def ids(variant: Variant) -> Arguments:
    q_ids = torch.arange(B * variant.M).reshape(B, -1) // 3
    return {"q_ids": q_ids, "k_ids": torch.zeros(B, variant.N, dtype=torch.int32)}


def positions(variant: Variant) -> Arguments:
    q_pos = torch.arange(H * variant.M).reshape(1, H, -1)
    return {"q_pos": q_pos, "k_pos": torch.arange(variant.N)[None], "left": 3, "right": None}


def attn_mask(variant: Variant) -> torch.Tensor:
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


def attend_with_relative_bias(_attention: Arguments, **arguments: Any) -> object:
    return tk.attention(**_attention, relative=tk.relative_bias(**arguments))


def attend_with_relative_keys(_attention: Arguments, **arguments: Any) -> object:
    return tk.attention(**_attention, relative=tk.relative_keys(**arguments))


def attend_with_alibi(_attention: Arguments, **arguments: Any) -> object:
    return tk.attention(**_attention, bias=tk.alibi(**arguments))


SHOWN = Mask.window(2, 1) & Mask.padding(LENGTHS)

FUNCTIONS = {
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
    "alibi": Function(
        attend_with_alibi,
        lambda v, backend: {
            "slopes": torch.ones(H),
            "align": "top_left",
            "_attention": {**qkv(v), "backend": backend},
        },
    ),
    "relative_bias": Function(
        attend_with_relative_bias,
        lambda v, backend: {
            "table": v.tensor(H, 9),
            "lowest": -4,
            "align": "top_left",
            "_attention": {**qkv(v), "backend": backend},
        },
    ),
    "relative_keys": Function(
        attend_with_relative_keys,
        lambda v, backend: {
            "keys": v.tensor(H, 9, D),
            "table": v.tensor(H, 9),
            "lowest": -4,
            "align": "top_left",
            "_attention": {**qkv(v), "backend": backend},
        },
    ),
}
