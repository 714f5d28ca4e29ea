"""Small valid calls of the dispatcher operators, by name. Compiled code calls them directly."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.hostile.arguments import Arguments, B, D, Function, H, Variant, cache, qkv
from tests.support.backends import operators_of
from tests.support.operators import operator_arguments
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.scores.options import DIFFERENTIABLE

_NUMBERS = tuple(field.name for field in FIELDS if field.kind != "Tensor?")
_WANTED = tuple(f"{name}_needs_grad" for name in DIFFERENTIABLE)
SCALAR_ARGUMENTS = (*_NUMBERS, *_WANTED, "deterministic")


def run(name: str, _backend: str, **arguments: Any) -> Any:
    """Runs the operator of a backend. Its arguments are in the order of the schema."""
    if _backend == "triton":
        operator = getattr(triton_operators, name)
    else:
        operator = getattr(operators_of(_backend), f"attention_{name}")
    return operator(*arguments.values())


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


def slopes(variant: Variant) -> torch.Tensor:
    is_double = variant.dtype == torch.float64
    return torch.ones(1, H, dtype=torch.float64 if is_double else torch.float32)


def table(variant: Variant, M: int, N: int) -> torch.Tensor:
    """A relative bias of all distances."""
    return slopes(variant).mT.expand(-1, max(M + N - 1, 0))


def keys(variant: Variant, M: int, N: int) -> torch.Tensor:
    """Keys of all distances."""
    return torch.ones(H, max(M + N - 1, 0), D, dtype=variant.dtype)


def forward(variant: Variant, backend: str) -> Arguments:
    q, k, v = (x.detach() for x in qkv(variant).values())
    given = options(variant) if variant.with_options else {}
    return operator_arguments(q, k, v, **given) | {"_backend": backend}


def packed(variant: Variant, backend: str) -> Arguments:
    q, k, v = (x.detach()[:1] for x in qkv(variant).values())
    M, N = variant.M, variant.N
    arguments = operator_arguments(
        q,
        k,
        v,
        alibi_slopes=slopes(variant),
        relative_bias=table(variant, M, N),
        relative_keys=keys(variant, M, N),
        cu_seqlens_q=torch.tensor([0, M // 2, M], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, N // 2, N], dtype=torch.int32),
    )
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
        q,
        given["k_cache"],
        given["v_cache"],
        scale=0.3,
        alibi_slopes=slopes(variant),
        diagonal_low=-9,
        diagonal_high=0,
        bottom_right=True,
        cache_seqlens=given["cache_seqlens"].int(),
        block_table=given.get("block_table"),
    )
    return arguments | {"_backend": backend}


FUNCTIONS = {
    "operator forward": Function(lambda **given: run("forward", **given), forward),
    "operator forward, packed": Function(lambda **given: run("forward", **given), packed),
    "operator backward": Function(lambda **given: run("backward", **given), backward),
    "operator forward, cache": Function(lambda **given: run("forward", **given), decode),
}
