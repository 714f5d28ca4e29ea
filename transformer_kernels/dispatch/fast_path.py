"""The fast path: the one place that decides which calls are plain, and runs them.

The general path takes every call and names what is wrong with it. Its checks cost more than the
kernel of a short attention. A plain call runs the same kernels with the same derivative:

- on a CPU past torch's dispatcher, with the checks of the compiled readers (`native.direct`);
- on a GPU in the same way unless there is an element mask, which takes the operators; what depends
  only on sizes and numbers is checked once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..backends import CpuBackend, CudaBackend
from ..backends.base import Outputs
from ..backends.native import cuda, direct
from ..common.storage import PLAIN_TYPES, are_plainly_stored
from ..common.torch_private import (
    MISSING_FOR_FAST_PATH,
    autocast_is_enabled,
    calls_are_observed,
    calls_are_transformed,
)
from ..masks.constraints import Constraint, KeyRange, Window
from ..masks.mask import Mask
from ..masks.resolved import ALL_VISIBLE, resolve
from ..problem import Layout, Problem, Shape, shape_of
from ..problem.cache import resolve_cache_mask
from ..problem.checks import DTYPES, broken_shape_rule, check_mask_tensors
from ..problem.layout import DENSE
from ..scores.options import PLAIN_SCORES, ScoreOptions, drawn_seed
from . import division
from .autocast import cast_for_autocast
from .autograd import attach, attach_plain
from .choose import prefers_triton

_CPU, _CUDA = CpuBackend(), CudaBackend()
_INTERCEPTED = "a mode, transform, tracer or profiler may intercept operators"
_SUBCLASS = "a tensor of a subclass"
_SELECTED = "selected keys"
_REQUIRES_GRAD = "a tensor requires grad"

_Windows = tuple[Constraint, ...]


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: Any = None,
    dropout_p: float = 0.0,
    is_plain: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
    layout: Layout = DENSE,
    grouped: bool = True,
    runs: bool = True,
) -> Tensor | str | None:
    """Returns o, differentiable to any order; the reason why the call needs the general path.

    Takes the arguments of `attention`, unchecked. `is_plain` is True if all options are None that
    are not named here. `layout` is that of a cache for `attention_decode`. `grouped` is True if k
    and v may have fewer heads than q. With `runs=False` nothing is computed, and None stands for o.
    """
    if not is_plain or return_lse is not False:
        return "an option other than mask, scale and dropout_p"
    if not (type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES):
        return _SUBCLASS
    if not (mask is None or type(mask) is Mask):
        return "a mask of another type"
    if division.current is not None:
        return "a sequence divided over processes"
    if type(dropout_p) is not float or type(backend) is not str:
        return "dropout_p is no float, or backend no str"
    if layout is DENSE and _runs_on_gpu(q, backend):
        return _attention_on_gpu(q, k, v, mask, scale, dropout_p, grouped, runs)
    if backend not in ("auto", "cpu") or not q.is_cpu:
        return f"tensors on {q.device} with backend={backend!r}"
    if not direct.AVAILABLE or calls_are_observed():
        return direct.unavailable_reason() or _INTERCEPTED
    if layout is not DENSE:
        return _decoding_on_cpu(q, k, v, mask, scale, layout, runs)
    if dropout_p != 0.0:
        return "dropout on a CPU"
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    resolved, block_mask, problem, row_stats = ALL_VISIBLE, None, None, None
    try:
        if mask is not None:
            (B, H, M, _), N = q.shape, k.shape[2]
            resolved = resolve(mask, B, H, M, N)
            if resolved.selected is not None:
                return _SELECTED
            if resolved.has_element_mask:
                block_mask = torch.empty(resolved.block_mask_shape(M, N), dtype=torch.uint8)
        o = torch.empty_like(q)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            problem = Problem(shape_of(q, k, v), resolved, scores)
            row_stats = torch.empty(2, *q.shape[:3], dtype=problem.shape.accumulate_dtype)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:  # nothing is checked yet
        return str(error)
    reason = direct.launch_forward(
        q, k, v, scores, resolved, DENSE, block_mask, grouped, o, row_stats, runs
    )
    if reason is not None or not runs:
        return reason
    if problem is None or row_stats is None:
        return o
    result: Tensor = attach(_CPU, problem, Outputs(o, row_stats, block_mask), q, k, v)
    return result


def _runs_on_gpu(q: Tensor, backend: str) -> bool:
    if backend == "auto":
        return q.is_cuda and not prefers_triton(q.device, q.dtype)
    return backend == "cuda"


def _decoding_on_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    mask: Mask | None,
    scale: Any,
    layout: Layout,
    runs: bool,
) -> Tensor | str | None:
    if type(layout.cache_seqlens) is not Tensor:
        return _SUBCLASS
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        return _REQUIRES_GRAD
    for x in layout[5:]:  # block_table, k_scale, v_scale
        if x is not None:
            if type(x) is not Tensor:
                return _SUBCLASS
            if grad_enabled and x.requires_grad:
                return _REQUIRES_GRAD
    if mask is not None and not all(
        type(one) is KeyRange or (type(one) is Window and one.align == "bottom_right")
        for one in mask.constraints
    ):
        return "a mask other than bottom-right windows and key ranges"
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    try:
        resolved = resolve_cache_mask(mask)
        o = torch.empty_like(q)
    except (RuntimeError, ValueError) as error:  # nothing is checked yet
        return str(error)
    reason = direct.launch_forward(
        q, k_cache, v_cache, scores, resolved, layout, None, True, o, None, runs
    )
    return o if reason is None and runs else reason


def _attention_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    dropout_p: float,
    grouped: bool,
    runs: bool,
) -> Tensor | str | None:
    if MISSING_FOR_FAST_PATH or calls_are_transformed():
        return _INTERCEPTED
    if not 0.0 <= dropout_p <= 1.0:
        return "dropout_p is not from 0 to 1"
    if not are_plainly_stored(q, k, v):
        return "tensors of different dtypes or devices, or without plain memory"
    if autocast_is_enabled():
        q, k, v = cast_for_autocast(q, k, v)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad and (q.is_inference() or k.is_inference() or v.is_inference()):
        return "tensors made in inference mode"
    windows = _windows(mask)
    problem = _checked_on_gpu(q, k, v, mask, windows, scale, grouped)
    if isinstance(problem, str):
        return problem
    if not runs:
        return None
    seed = None
    if dropout_p != 0.0:
        seed = drawn_seed(problem.shape.device)
        scores = ScoreOptions(scale, dropout_p=dropout_p, seed=seed)
        problem = Problem(problem.shape, problem.mask, scores)
    computed = None if problem.mask.has_element_mask else cuda.forward(problem, q, k, v)
    if not needs_grad:
        return (computed or _CUDA.forward(problem, q, k, v)).o
    if windows is None:
        found = attach(_CUDA, problem, computed, q, k, v)
        o: Tensor = found[0] if computed is None else found
        return o
    if seed is None:
        return attach_plain(_CUDA, problem, computed, q, k, v, ())
    return attach_plain(_CUDA, problem, computed, q, k, v, ("seed",), seed)


def _checked_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    windows: _Windows | None,
    scale: float | None,
    grouped: bool,
) -> Problem | str:
    """Returns the problem of the call without dropout."""
    if not (scale is None or type(scale) is float):
        return "scale is no float"
    device = q.device
    problem = checked_sizes(
        q.shape, k.shape, v.shape, q.dtype, device, scale, grouped, windows or ()
    )
    if isinstance(problem, str) or mask is None or windows is not None:
        return problem
    shape = problem.shape
    try:
        check_mask_tensors(mask, device)
        resolved = resolve(mask, shape.B, shape.H_q, shape.M, shape.N)
    except ValueError as error:
        return str(error)
    return _SELECTED if resolved.selected is not None else Problem(shape, resolved, problem.scores)


def _windows(mask: Mask | None) -> _Windows | None:
    """Returns the constraints of the mask; None if some are no windows."""
    if mask is None:
        return ()
    for one in mask.constraints:
        if type(one) is not Window:
            return None
    return mask.constraints


@functools.lru_cache(maxsize=512)
def checked_sizes(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    scale: float | None,
    grouped: bool,
    windows: _Windows,
) -> Problem | str:
    """Returns the problem of these sizes."""
    if not len(q) == len(k) == len(v) == 4 or dtype not in DTYPES:
        return "q, k and v must have 4 dimensions and a supported dtype"
    dimensions = ("batch", "heads", "length", "width")
    if (broken := broken_shape_rule(q, k, v, dimensions, ("q", "k", "v"))) is not None:
        return broken
    if not (grouped or q[1] == k[1]):
        return "k has fewer heads than q"
    # A zero equals another one with a different sign, to which this cache would lead.
    if scale is not None and (scale == 0.0 or not math.isfinite(scale)):
        return "scale is 0 or not finite"
    shape = Shape(q[0], q[1], k[1], q[2], k[2], q[3], v[3], dtype, device)
    resolved = resolve(Mask(windows), *q[:3], k[2]) if windows else ALL_VISIBLE
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    problem = Problem(shape, resolved, scores)
    return "; ".join(_CUDA.unsupported_reasons(problem)) or problem
