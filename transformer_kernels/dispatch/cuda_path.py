"""Fast path of a plain call on a GPU: what depends only on sizes and numbers is checked once.

The checks of the general path cost more host time than a launch, and a short training step waits
for the host. The operator of the kernels runs as in the general path. A call that is not plainly
valid is declined; the general path then runs it or raises its error.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..backends import CudaBackend
from ..common.storage import are_plainly_stored
from ..common.torch_private import MISSING_FOR_FAST_PATH, autocast_is_enabled, calls_are_transformed
from ..masks.constraints import Constraint, Window
from ..masks.mask import Mask
from ..masks.resolved import ALL_VISIBLE, resolve
from ..problem import Problem, Shape
from ..problem.checks import DTYPES, broken_shape_rule, check_mask_tensors
from ..scores.options import PLAIN_SCORES, ScoreOptions, drawn_seed
from .autocast import cast_for_autocast
from .autograd import attach, attach_plain

_CUDA = CudaBackend()

_Windows = tuple[Constraint, ...]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    grouped: bool,
    dropout_p: float,
) -> Tensor | None:
    """Returns o, differentiable to any order; None if the call needs the general path.

    q, k and v are of no subclass. `grouped` is True if k and v may have fewer heads than q.
    """
    if MISSING_FOR_FAST_PATH or calls_are_transformed():
        return None
    if not 0.0 <= dropout_p <= 1.0 or not (mask is None or type(mask) is Mask):
        return None
    if not are_plainly_stored(q, k, v):
        return None
    if autocast_is_enabled():
        q, k, v = cast_for_autocast(q, k, v)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad and (q.is_inference() or k.is_inference() or v.is_inference()):
        return None
    windows = _windows(mask)
    problem = _checked(q, k, v, mask, windows, scale, grouped)
    if problem is None:
        return None
    seed = None
    if dropout_p != 0.0:
        seed = drawn_seed(problem.shape.device)
        scores = ScoreOptions(scale, dropout_p=dropout_p, seed=seed)
        problem = Problem(problem.shape, problem.mask, scores)
    if not needs_grad:
        return _CUDA.forward(problem, q, k, v).o
    if windows is None:
        o: Tensor = attach(_CUDA, problem, None, q, k, v)[0]
        return o
    if seed is None:
        return attach_plain(_CUDA, problem, q, k, v, ())
    return attach_plain(_CUDA, problem, q, k, v, ("seed",), seed)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    windows: _Windows | None,
    scale: float | None,
    grouped: bool,
) -> Problem | None:
    """Returns the problem of the call without dropout; None if the call is not plainly valid."""
    if not (scale is None or type(scale) is float):
        return None
    device = q.device
    problem = _problem(q.shape, k.shape, v.shape, q.dtype, device, scale, grouped, windows or ())
    if problem is None or mask is None or windows is not None:
        return problem
    shape = problem.shape
    try:
        check_mask_tensors(mask, device)
        resolved = resolve(mask, shape.B, shape.H_q, shape.M, shape.N)
    except ValueError:  # the general path names what is wrong
        return None
    return Problem(shape, resolved, problem.scores)


def _windows(mask: Mask | None) -> _Windows | None:
    """Returns the constraints of the mask; None if some are no windows."""
    if mask is None:
        return ()
    for one in mask.constraints:
        if type(one) is not Window:
            return None
    return mask.constraints


@functools.lru_cache(maxsize=512)
def _problem(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    scale: float | None,
    grouped: bool,
    windows: _Windows,
) -> Problem | None:
    """Returns the problem of these sizes; None if the kernels do not support it, or if an argument
    is not valid."""
    if not len(q) == len(k) == len(v) == 4 or dtype not in DTYPES:
        return None
    dimensions = ("batch", "heads", "length", "width")
    if broken_shape_rule(q, k, v, dimensions, ("q", "k", "v")) is not None:
        return None
    if not (grouped or q[1] == k[1]):
        return None
    # A zero equals another one with a different sign, to which this cache would lead.
    if scale is not None and (scale == 0.0 or not math.isfinite(scale)):
        return None
    shape = Shape(q[0], q[1], k[1], q[2], k[2], q[3], v[3], dtype, device)
    resolved = resolve(Mask(windows), *q[:3], k[2]) if windows else ALL_VISIBLE
    scores = PLAIN_SCORES if scale is None else ScoreOptions(scale)
    problem = Problem(shape, resolved, scores)
    return None if _CUDA.unsupported_reasons(problem) else problem
