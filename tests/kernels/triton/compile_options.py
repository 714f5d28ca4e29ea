"""Compiles the kernels with every option for one chip; test_compilation.py runs this script."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from tests.kernels.triton import linear_calls
from transformer_kernels import (
    Mask,
    RelativeBias,
    RelativeKeys,
    alibi,
    relative_bias,
    relative_keys,
)
from transformer_kernels.backends.triton import launch, target
from transformer_kernels.backends.triton.compile_report import Driver, compile_for
from transformer_kernels.backends.triton.config import CHIPS
from transformer_kernels.masks.constraints import Align
from transformer_kernels.problem import Problem, Saved
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.varlen import one_entry, varlen_problem
from transformer_kernels.scores.options import DIFFERENTIABLE

B, H, S, D = 2, 4, 320, 64  # S is a multiple of 16: 16-byte loads use the most shared memory
CHIP = sys.argv[1]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


Q = empty(B, H, S, D)
K = empty(B, H // 2, S, D)
DENSE = Mask.dense(empty(B, 1, S, S, dtype=torch.bool))
SEGMENTS = Mask.segments(integers(B, S)) & Mask.causal()
POSITIONS = Mask.positions(integers(1, H, S), integers(B, S), 70, None)
LAYOUT = Mask.block_sparse(empty(6, 6, dtype=torch.bool), 60)


def relative(heads: int = H, align: Align = "top_left") -> RelativeBias:
    return relative_bias(empty(heads, 9, dtype=torch.float32), lowest=-4, align=align)


def keys(
    heads: int = H,
    align: Align = "top_left",
    dtype: torch.dtype = torch.bfloat16,
    table: Tensor | None = None,
) -> RelativeKeys:
    return relative_keys(empty(heads, 9, D, dtype=dtype), table=table, lowest=-4, align=align)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"mask": DENSE},
    "segments": {"mask": SEGMENTS},
    "positions": {"mask": POSITIONS},
    "layout": {"mask": LAYOUT},
    "ranges": {"mask": Mask.key_range(integers(B), integers(B))},
    "dropout": {"dropout_p": 0.1, "seed": integers()},
    "dropout-part": {
        "offsets": {"dropout_row": 37, "dropout_column": 64, "dropout_head": 1},
        "dropout_p": 0.1,
        "seed": integers(),
    },
    "softcap": {"softcap": 3.0},
    "alibi": {"bias": alibi(empty(H, dtype=torch.float32))},
    "bias": {"bias": empty(B, H, S, S)},
    "bias-float32": {"bias": empty(B, H, S, S, dtype=torch.float32)},
    "bias-keys": {"bias": empty(H, 1, S), "mask": Mask.causal()},
    "relative": {"relative": relative(), "mask": Mask.causal()},
    "relative-shared": {"relative": relative(1), "mask": LAYOUT},
    "keys": {"relative": keys(), "mask": Mask.causal()},
    "keys-full": {"relative": keys()},
    "keys-shared": {"relative": keys(1), "mask": LAYOUT, "softcap": 3.0},
    "everything": {
        "mask": DENSE & SEGMENTS & POSITIONS & LAYOUT,
        "bias": empty(B, H, S, S, dtype=torch.float32),
        "relative": relative(),
        "dropout_p": 0.1,
        "seed": integers(),
        "softcap": 2.0,
    },
}
OPTIONS["everything-keys"] = {
    **OPTIONS["everything"],
    "relative": keys(table=empty(H, 9, dtype=torch.float32)),
}


def run(q: Tensor, k: Tensor, offsets: dict[str, Any] | None = None, **options: Any) -> None:
    """Launches a forward and a backward pass, with gradients of lse and of biases."""
    problem = dense_problem(q, k, k, **options)
    problem = replace(problem, scores=problem.scores._replace(**(offsets or {})))
    call = launch.prepare(problem, q, k, k)
    o, row_stats, block_mask = launch.forward(call)
    saved = Saved(q, k, k, o, row_stats, block_mask if block_mask.numel() else None)
    launch.backward(call, o, torch.empty_like(row_stats[0]), saved, wanted(problem))


def wanted(problem: Problem) -> list[str]:
    return [name for name in DIFFERENTIABLE if getattr(problem.scores, name) is not None]


def run_varlen(**options: Any) -> None:
    """Launches a varlen forward and backward pass."""
    q, k = empty(500, H, D), empty(500, H // 2, D)
    starts = integers(B + 1)
    mask = Mask.causal(align="bottom_right")
    problem = varlen_problem(q, k, k, starts, max_seqlen_q=S, max_seqlen_k=S, mask=mask, **options)
    call = launch.prepare(problem, one_entry(q), one_entry(k), one_entry(k))
    o, row_stats, _ = launch.forward(call)
    saved = Saved(call.q, call.k, call.v, o, row_stats, None)
    launch.backward(call, o, None, saved, wanted(problem))


shared_kib: dict[str, dict[str, float]] = defaultdict(dict)
cache_keys: dict[str, dict[str, set[str]]] = {
    "lengths": defaultdict(set),
    "lengths-relative": defaultdict(set),
    "lengths-keys": defaultdict(set),
    "lengths-linear": defaultdict(set),
}
fused: dict[str, int] = {}
"""Fused operations of each kernel, but for multiplications by log2(e)."""
LOG2E = "0f3FB8AA3B"
case = ""


def compile_instead(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
    if case in cache_keys:
        cache_keys[case][fn.jit_function.__name__].add(key)
    else:
        compiled = compile_for(CHIP, fn.jit_function, compile)
        name, kib = fn.jit_function.__name__, compiled.metadata.shared / 1024
        shared_kib[case][name] = max(kib, shared_kib[case].get(name, 0))
        if case == "plain" and "ptx" in compiled.asm:
            lines = compiled.asm["ptx"].splitlines()
            fused[name] = sum("fma.rn" in line and LOG2E not in line for line in lines)
    return True


triton.runtime.driver.set_active(Driver(CHIP))
triton.knobs.runtime.jit_cache_hook = compile_instead
with target.override_chip(CHIPS[CHIP]):
    for case, options in OPTIONS.items():  # noqa: B007  (read by the hook)
        run(Q, K, **options)
    case = "everything-float32"
    run(Q.float(), K.float(), **OPTIONS["everything"])
    case = "everything-keys-float32"
    run(Q.float(), K.float(), **OPTIONS["everything-keys"])
    case = "everything-keys-128"
    wide = relative_keys(empty(H, 9, 128), table=empty(H, 9, dtype=torch.float32), lowest=-4)
    options = {**OPTIONS["everything"], "relative": wide}
    run(empty(B, H, S, 128), empty(B, H // 2, S, 128), **options)
    for width, name in ((128, "segments"), (256, "segments"), (128, "positions")):
        case = f"{name}-{width}"
        run(empty(B, H, S, width), empty(B, H // 2, S, width), **OPTIONS[name])
    case = "varlen"
    run_varlen()
    case = "varlen-relative"
    run_varlen(relative=relative(align="bottom_right"))
    case = "varlen-keys"
    run_varlen(relative=keys(align="bottom_right"))
    by_case: dict[str, dict[str, Any]] = {
        "lengths": {},
        "lengths-relative": {"relative": relative()},
        "lengths-keys": {"relative": keys()},
    }
    for case, biases in by_case.items():  # noqa: B007  (read by the hook)
        for length, mask in (  # 101: a relative bias of 16 * 13 distances
            (1, None), (16, None), (101, Mask.causal()), (1024, Mask.window(1, 0)),
            (4096, Mask.window(16, 32, align="bottom_right")),
        ):  # fmt: skip
            options = {"mask": mask, **biases}
            run(empty(B, H, length, D), empty(B, H // 2, length + 7, D), **options)
    for case, (call, _) in linear_calls.CALLS.items():  # noqa: B007
        call()
    case = "lengths-linear"
    for length in (65, 80, 320, 1024):
        linear_calls.run(length)
counts = {case: {name: len(found) for name, found in of.items()} for case, of in cache_keys.items()}
print(json.dumps({"shared_kib": shared_kib, "keys": counts, "fused": fused}))
