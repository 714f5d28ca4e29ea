"""Launches the kernels with every option on meta tensors, which compiles them for one chip.

test_compilation.py runs this file as a script, with the name of the chip.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

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
from transformer_kernels.linear.delta import types as delta
from transformer_kernels.linear.delta.triton import launch as delta_launch
from transformer_kernels.linear.family import BackwardCall
from transformer_kernels.linear.triton import launch as linear_launch
from transformer_kernels.linear.types import Cotangents, Inputs, Options
from transformer_kernels.linear.types import Saved as LinearSaved
from transformer_kernels.masks.constraints import Align
from transformer_kernels.problem import Problem, Saved
from transformer_kernels.problem.cache import cache_problem
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.varlen import one_entry, varlen_problem
from transformer_kernels.scores.options import DIFFERENTIABLE

B, H, S, D = 2, 4, 320, 64  # S is a multiple of 16: 16-byte loads use the most shared memory


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def integers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


DENSE = Mask.dense(empty(B, 1, S, S, dtype=torch.bool))
SEGMENTS = Mask.segments(integers(B, S)) & Mask.causal()
POSITIONS = Mask.positions(integers(1, H, S), integers(B, S), 70, None)
SELECTED = Mask.selected(integers(B, S, 40), 2)
LAYOUT = Mask.block_sparse(empty(6, 6, dtype=torch.bool), 60)


def relative(heads: int = H, align: Align = "top_left") -> RelativeBias:
    return relative_bias(floats(heads, 9), lowest=-4, align=align)


def keys(
    heads: int = H,
    align: Align = "top_left",
    dtype: torch.dtype = torch.bfloat16,
    table: Tensor | None = None,
) -> RelativeKeys:
    return relative_keys(empty(heads, 9, D, dtype=dtype), table=table, lowest=-4, align=align)


def run(
    width: int = D,
    *,
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, int] = (S, S),
    offsets: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Launches a forward and a backward pass, with gradients of lse and of biases."""
    q = empty(B, H, lengths[0], width, dtype=dtype)
    k = empty(B, H // 2, lengths[1], width, dtype=dtype)
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


def run_varlen_pages() -> None:
    """Launches the forward pass of packed queries whose keys are in pages."""
    q, pages, starts = empty(500, H, D), empty(40, H // 2, 16, D), integers(B + 1)
    mask = Mask.causal(align="bottom_right")
    problem = varlen_problem(
        q, pages, pages, starts, starts, block_table=integers(B, 20), max_seqlen_q=S,
        max_seqlen_k=S, mask=mask,
    )  # fmt: skip
    launch.forward(launch.prepare(problem, one_entry(q), pages, pages))


def run_decode(
    capacity: int = 1280,
    *,
    width: int = D,
    dtype: torch.dtype = torch.bfloat16,
    M: int = 2,
    paged: bool = False,
    int8: bool = False,
    **options: Any,
) -> None:
    """Launches decoding."""
    q = empty(B, H, M, width, dtype=dtype)
    shape = (capacity // 16, H // 2, 16) if paged else (B, H // 2, capacity)
    k, scale = empty(*shape, width, dtype=torch.int8 if int8 else dtype), floats(*shape)
    if int8:
        options |= {"k_scale": scale, "v_scale": scale}
    table = integers(B, capacity // 16) if paged else None
    problem = cache_problem(q, k, k, integers(B), table, **options)
    launch.decode(launch.prepare(problem, q, k, k))


def run_decode_lengths() -> None:
    for capacity, M in ((1280, 1), (2048, 2), (1296, 3)):
        run_decode(capacity, M=M)


def run_linear(
    length: int = 320,
    *,
    dtype: torch.dtype = torch.bfloat16,
    feature_map: str = "elu",
    causal: bool = True,
    normalize: bool = True,
    decay: bool = False,
    needs_grad: bool = False,
    state: bool = False,
    keys: bool = False,
    packed: bool = False,
    width: int = D,
) -> None:
    """Launches a forward and a backward pass."""
    entries = 1 if packed else B
    q, k = (empty(entries, heads, length, width, dtype=dtype) for heads in (H, H // 2))
    x = Inputs(q, k, k)
    if decay:
        x = x._replace(log_decay=floats(entries, H // 2, length))
    if state:
        x = x._replace(S=floats(B, H // 2, width, width), z=floats(B, H // 2, width))
    if keys:
        x = x._replace(key_start=integers(B), key_end=integers(B))
    if packed:
        x = x._replace(cu_seqlens=empty(B + 1, dtype=torch.int32))
    options = Options(feature_map, normalize, 1e-6, causal)
    o, normalizer, S, z = linear_launch.forward(x, options)
    cotangents, saved = Cotangents(q, S, z), LinearSaved(o, normalizer)
    linear_launch.backward(BackwardCall(cotangents, saved, x, options, (needs_grad,)))


def run_linear_steps() -> None:
    x = empty(B, H, 3, D)
    state = Inputs(x, x, x, floats(B, H, 3), floats(B, H, D, D), floats(B, H, D))
    linear_launch.steps(state, Options("elu", causal=True, normalize=True, eps=1e-6))


def run_delta(
    length: int = 320,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gates: int = 1,
    l2norm: bool = True,
    state: bool = False,
    packed: bool = False,
    width: int = D,
) -> None:
    """Launches a forward and a backward pass."""
    entries = 1 if packed else B
    q, v = (empty(entries, heads, length, width, dtype=dtype) for heads in (H // 2, H))
    x = delta.Inputs(q, q, v, floats(entries, H, length, gates), floats(entries, H, length))
    if state:
        x = x._replace(S=floats(B, H, width, width))
    if packed:
        x = x._replace(cu_seqlens=empty(B + 1, dtype=torch.int32))
    options = delta.Options(1.0, l2norm)
    o, S = delta_launch.forward(x, options)
    cotangents = delta.Cotangents(o, S if state else None)
    delta_launch.backward(BackwardCall(cotangents, (), x, options))


def run_delta_steps(gates: int) -> None:
    x, S = empty(B, H, 3, D), floats(B, H, D, D)
    inputs = delta.Inputs(x, x, x, floats(B, H, 3, gates), floats(B, H, 3), S)
    delta_launch.steps(inputs, delta.Options(1.0))


def run_lengths(**options: Any) -> None:
    """Lengths for which nothing is compiled anew."""
    for length, mask in (  # 101: a relative bias of 16 * 13 distances
        (1, None), (16, None), (101, Mask.causal()), (1024, Mask.window(1, 0)),
        (4096, Mask.window(16, 32, align="bottom_right")),
    ):  # fmt: skip
        run(lengths=(length, length + 7), mask=mask, **options)


def run_linear_lengths(run: Callable[[int], None]) -> None:
    for length in (65, 80, 320, 1024):
        run(length)


EVERYTHING: dict[str, Any] = {
    "mask": DENSE & SEGMENTS & POSITIONS & LAYOUT & SELECTED,
    "bias": floats(B, H, S, S),
    "relative": relative(),
    "dropout_p": 0.1,
    "seed": integers(),
    "softcap": 2.0,
}
EVERYTHING_KEYS = {**EVERYTHING, "relative": keys(table=floats(H, 9))}
WIDE = {**EVERYTHING, "relative": relative_keys(empty(H, 9, 128), table=floats(H, 9), lowest=-4)}
DROPOUT_PART = {"dropout_row": 48, "dropout_column": 64, "dropout_head": 1}

ALWAYS = {"forward_kernel", "bwd_preprocess_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"}
LISTS = ALWAYS | {"block_mask_kernel", "list_kernel"}
TILES = {"tile_sums_kernel"}
STRIPS = {"strip_sums_kernel"}
DISTANCES = {"distance_sums_kernel"}
DECODE = {"decode_kernel", "combine_kernel"}
LINEAR = {"sums_kernel", "prefix_kernel", "results_kernel"}
NORMALIZED = LINEAR | {"delta_kernel"}
DELTA = {
    "sums_kernel", "pairs_kernel", "scan_kernel", "reverse_kernel", "state_gradients_kernel",
    "pair_gradients_kernel", "decay_gradient_kernel",
}  # fmt: skip
MERGED, OWN = DELTA | {"merge_kernel"}, DELTA | {"own_pairs_kernel"}

CALLS: dict[str, tuple[Callable[[], None], set[str]]] = {
    "plain": (run, ALWAYS),
    "dense": (partial(run, mask=DENSE), LISTS),
    "segments": (partial(run, mask=SEGMENTS), LISTS),
    "segments-128": (partial(run, 128, mask=SEGMENTS), LISTS),
    "segments-256": (partial(run, 256, mask=SEGMENTS), LISTS),
    "positions": (partial(run, mask=POSITIONS), LISTS),
    "positions-128": (partial(run, 128, mask=POSITIONS), LISTS),
    "layout": (partial(run, mask=LAYOUT), LISTS),
    "selected": (partial(run, mask=SELECTED), LISTS),
    "selected-256": (partial(run, 256, mask=SELECTED & Mask.causal()), LISTS),
    "ranges": (partial(run, mask=Mask.key_range(integers(B), integers(B))), ALWAYS),
    "dropout": (partial(run, dropout_p=0.1, seed=integers()), ALWAYS),
    "dropout-part": (partial(run, offsets=DROPOUT_PART, dropout_p=0.1, seed=integers()), ALWAYS),
    "softcap": (partial(run, softcap=3.0), ALWAYS),
    "alibi": (partial(run, bias=alibi(floats(H))), ALWAYS),
    "bias": (partial(run, bias=empty(B, H, S, S)), ALWAYS | TILES),
    "bias-float32": (partial(run, bias=floats(B, H, S, S)), ALWAYS | TILES),
    "bias-keys": (
        partial(run, bias=empty(H, 1, S), mask=Mask.causal()),
        ALWAYS | {"column_sums_kernel"},
    ),
    "relative": (partial(run, relative=relative(), mask=Mask.causal()), ALWAYS | STRIPS),
    "relative-shared": (partial(run, relative=relative(1), mask=LAYOUT), LISTS | STRIPS),
    "keys": (partial(run, relative=keys(), mask=Mask.causal()), ALWAYS | DISTANCES),
    "keys-full": (partial(run, relative=keys()), ALWAYS | DISTANCES),
    "keys-shared": (partial(run, relative=keys(1), mask=LAYOUT, softcap=3.0), LISTS | DISTANCES),
    "everything": (partial(run, **EVERYTHING), LISTS | TILES | STRIPS),
    "everything-float32": (
        partial(run, dtype=torch.float32, **EVERYTHING),
        LISTS | TILES | STRIPS,
    ),
    "everything-keys": (partial(run, **EVERYTHING_KEYS), LISTS | TILES | STRIPS | DISTANCES),
    "everything-keys-float32": (
        partial(run, dtype=torch.float32, **EVERYTHING_KEYS),
        LISTS | TILES | STRIPS | DISTANCES,
    ),
    "everything-keys-128": (partial(run, 128, **WIDE), LISTS | TILES | STRIPS | DISTANCES),
    "varlen": (run_varlen, ALWAYS),
    "varlen-relative": (
        partial(run_varlen, relative=relative(align="bottom_right")),
        ALWAYS | STRIPS,
    ),
    "varlen-pages": (run_varlen_pages, {"forward_kernel"}),
    "varlen-keys": (partial(run_varlen, relative=keys(align="bottom_right")), ALWAYS | DISTANCES),
    "decode": (run_decode, DECODE),
    "decode-one-split": (partial(run_decode, 64), {"decode_kernel"}),
    "decode-pages": (partial(run_decode, paged=True), DECODE),
    "decode-int8": (partial(run_decode, paged=True, int8=True), DECODE),
    "decode-int8-float16": (partial(run_decode, int8=True, dtype=torch.float16), DECODE),
    "decode-everything": (
        partial(
            run_decode,
            mask=Mask.window(600, 2, align="bottom_right") & Mask.key_range(*[integers(B)] * 2),
            bias=alibi(floats(H), align="bottom_right"),
            relative=relative(align="bottom_right"),
            softcap=2.0,
            paged=True,
            int8=True,
            width=128,
        ),
        DECODE,
    ),
    "decode-keys": (partial(run_decode, paged=True, relative=keys(align="bottom_right")), DECODE),
    "linear": (run_linear, NORMALIZED),
    "linear-one-segment": (partial(run_linear, 16), NORMALIZED),
    "linear-float16": (
        partial(run_linear, dtype=torch.float16, decay=True, state=True),
        NORMALIZED,
    ),
    "linear-odd": (partial(run_linear, width=40, feature_map="relu", keys=True), NORMALIZED),
    "linear-all": (partial(run_linear, causal=False, keys=True, state=True), NORMALIZED),
    "linear-plain": (partial(run_linear, normalize=False, feature_map="identity"), LINEAR),
    "linear-decay": (
        partial(run_linear, decay=True, needs_grad=True, packed=True, keys=True),
        NORMALIZED | {"decay_gradient_kernel"},
    ),
    "linear-steps": (run_linear_steps, {"steps_kernel"}),
    "delta": (run_delta, MERGED),
    "delta-float16": (partial(run_delta, dtype=torch.float16, l2norm=False, state=True), MERGED),
    "delta-packed": (partial(run_delta, packed=True, state=True, width=40), MERGED),
    "delta-channels": (partial(run_delta, gates=D), MERGED | OWN),
    "delta-channels-128": (partial(run_delta, gates=128, width=128, packed=True), OWN),
    "delta-steps": (partial(run_delta_steps, 1), {"steps_kernel"}),
    "delta-channels-steps": (partial(run_delta_steps, D), {"steps_kernel"}),
}
"""A call, and the kernels that it launches."""
LENGTHS: dict[str, tuple[Callable[[], None], dict[str, int]]] = {
    "lengths": (run_lengths, dict.fromkeys(ALWAYS, 1)),
    "lengths-relative": (
        partial(run_lengths, relative=relative()),
        dict.fromkeys(ALWAYS | STRIPS, 1),
    ),
    "lengths-keys": (partial(run_lengths, relative=keys()), dict.fromkeys(ALWAYS | DISTANCES, 1)),
    "lengths-decode": (run_decode_lengths, dict.fromkeys(DECODE, 1)),
    "lengths-linear": (
        partial(run_linear_lengths, run_linear),
        {"sums_kernel": 2, "prefix_kernel": 6, "results_kernel": 7, "delta_kernel": 1},
    ),
    "lengths-delta": (
        partial(run_linear_lengths, run_delta),
        dict.fromkeys(MERGED, 1)
        | dict.fromkeys(("sums_kernel", "decay_gradient_kernel", "scan_kernel"), 2),
    ),
}
"""Calls with several lengths, and how often a kernel is compiled.

Linear attention: sums of S and dS; prefix sums of S and z, forward, and of both and their
gradients, backward; o, and dq, dk and dv of one segment and of several. Delta rule: scans for o and
for the states. A stride of log_decay is a length: once for multiples of 16.
"""
LOG2E = "0f3FB8AA3B"


def compile_calls(chip: str) -> dict[str, Any]:
    """Shared memory and number of compilations of the kernels, by call and kernel; their fused
    operations with and without a bias, but for multiplications by log2(e)."""
    shared_kib: dict[str, dict[str, float]] = defaultdict(dict)
    cache_keys: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in LENGTHS}
    fused: dict[str, dict[str, int]] = {"plain": {}, "alibi": {}}

    def compile_instead(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        name = fn.jit_function.__name__
        if case in LENGTHS:
            cache_keys[case][name].add(key)
            return True
        compiled = compile_for(chip, fn.jit_function, compile)
        kib = compiled.metadata.shared / 1024
        shared_kib[case][name] = max(kib, shared_kib[case].get(name, 0))
        if case in fused and "ptx" in compiled.asm:
            lines = compiled.asm["ptx"].splitlines()
            fused[case][name] = sum("fma.rn" in line and LOG2E not in line for line in lines)
        return True

    triton.runtime.driver.set_active(Driver(chip))
    triton.knobs.runtime.jit_cache_hook = compile_instead
    calls: dict[str, tuple[Callable[[], None], object]] = {**CALLS, **LENGTHS}
    with target.override_chip(CHIPS[chip]):
        for case, (call, _) in calls.items():  # noqa: B007  (read by the hook)
            call()
    counts = {
        case: {name: len(found) for name, found in kernels.items()}
        for case, kernels in cache_keys.items()
    }
    return {"shared_kib": shared_kib, "keys": counts, "fused": fused}


if __name__ == "__main__":
    print(json.dumps(compile_calls(sys.argv[1])))
