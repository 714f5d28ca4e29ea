"""Calls of linear attention on meta tensors, which compile_options.py compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from transformer_kernels.linear.triton import launch
from transformer_kernels.linear.types import BackwardCall, Cotangents, Inputs, Options, Saved

B, H, D = 2, 4, 64


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return empty(count, dtype=dtype)


def run(
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
        x = x._replace(log_decay=empty(entries, H // 2, length))
    if state:
        x = x._replace(S=empty(B, H // 2, width, width), z=empty(B, H // 2, width))
    if keys:
        x = x._replace(key_start=integers(B), key_end=integers(B))
    if packed:
        x = x._replace(cu_seqlens=integers(B + 1, torch.int32))
    options = Options(feature_map, normalize, 1e-6, causal)
    o, normalizer, S, z = launch.forward(x, options)
    cotangents, saved = Cotangents(q, S, z), Saved(o, normalizer)
    launch.backward(BackwardCall(cotangents, saved, x, options, needs_grad))


def run_steps() -> None:
    x = empty(B, H, 3, D, dtype=torch.bfloat16)
    state = Inputs(x, x, x, empty(B, H, 3), empty(B, H, D, D), empty(B, H, D))
    launch.steps(state, Options("elu", causal=True, normalize=True, eps=1e-6))


SCANS = {"scan_kernel", "sums_kernel", "prefix_kernel"}
NORMALIZED = SCANS | {"delta_kernel"}

CALLS: dict[str, tuple[Callable[[], None], set[str]]] = {
    "linear": (run, NORMALIZED),
    "linear-one-segment": (partial(run, 16), NORMALIZED - {"sums_kernel", "prefix_kernel"}),
    "linear-float16": (partial(run, dtype=torch.float16, decay=True, state=True), NORMALIZED),
    "linear-odd": (partial(run, width=40, feature_map="relu", keys=True), NORMALIZED),
    "linear-all": (partial(run, causal=False, keys=True, state=True), NORMALIZED),
    "linear-plain": (partial(run, normalize=False, feature_map="identity"), SCANS),
    "linear-decay": (
        partial(run, decay=True, needs_grad=True, packed=True, keys=True),
        NORMALIZED | {"decay_gradient_kernel"},
    ),
    "linear-steps": (run_steps, {"steps_kernel"}),
}
"""A call, and the kernels that it launches, by name."""
