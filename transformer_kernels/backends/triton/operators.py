"""Torch operators `triton_forward` and `triton_backward`, opaque to torch.compile.

Their definition does not import Triton; the first call does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...common.namespace import NAMESPACE
from ...common.storage import check_storage
from ...problem import Problem, Saved, unpack
from .. import schema


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    from . import launch

    problem = unpack(q, k, v, options)
    _check(problem, {"q": q, "k": k, "v": v})
    run = launch.decode if problem.kind == "cache" else launch.forward
    with torch.cuda.device_of(q):  # Triton launches on the current device
        return run(launch.prepare(problem, q, k, v))


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    row_stats: Tensor,
    block_mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    from . import launch

    options, wanted = schema.unpack_backward(rest)  # every result is deterministic
    problem = unpack(q, k, v, options)
    saved = Saved(q, k, v, o, row_stats, block_mask)
    _check(problem, {"do": do, "dlse": dlse, **saved._asdict()})
    if problem.kind == "cache":
        raise ValueError("attention with a cache has no backward pass")
    with torch.cuda.device_of(q):
        call = launch.prepare(problem, q, k, v)
        gradients = launch.backward(call, do, dlse, saved, wanted)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _check(problem: Problem, tensors: dict[str, Tensor | None]) -> None:
    check_storage((*tensors.items(), *problem.tensors().items()))


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an operator for GPU tensors, and for CPU tensors by Triton's interpreter."""
    _LIBRARY.define(name + schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


NAMES = "triton_forward", "triton_backward"
forward = register(NAMES[0], schema.FORWARD, _forward, schema.forward_fake)
backward = register(NAMES[1], schema.BACKWARD, _backward, schema.backward_fake)
