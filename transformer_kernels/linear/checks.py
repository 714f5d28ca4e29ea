"""Validation of linear attention calls. Errors name the argument, its value and the rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..common.argument_checks import (
    check_bool,
    check_number,
    check_tensor,
    shown,
    values_are_readable,
)
from ..common.storage import check_storage
from ..dispatch.autocast import cast_for_autocast
from ..masks.constraints import KeyRange
from ..masks.mask import Mask
from ..masks.resolved import resolve
from ..problem import Shape, shape_of
from ..problem.cache import check_no_gradient
from ..problem.checks import check_mask_tensors, check_tensors
from ..problem.types import accumulate_dtype
from ..problem.varlen import check_cu_seqlens, one_entry, read_starts
from .family import FamilyProblem
from .types import FEATURE_MAPS, FeatureMap, Inputs, LinearState, Options

DENSE = ("batch", "heads", "length", "width")
PACKED = ("length", "heads", "width")


def check_options(feature_map: FeatureMap, *, causal: bool, normalize: bool, eps: float) -> Options:
    """Returns the options; those of a callable feature map have the name "identity"."""
    if callable(feature_map):
        feature_map = "identity"
    elif not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        names = ", ".join(map(repr, FEATURE_MAPS))
        raise ValueError(f"feature_map must be {names} or a callable, got {shown(feature_map)}")
    check_bool("causal", causal)
    check_bool("normalize", normalize)
    number = check_number("eps", eps)
    if number <= 0.0:
        raise ValueError(f"eps must be greater than 0, got {number}")
    return Options(feature_map, normalize, number, causal)


def map_features(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dimensions: tuple[str, ...] = DENSE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Casts q, k and v for autocast, checks them, and applies a callable feature map to q and k."""
    q, k, v = cast_for_autocast(q, k, v)
    check_tensors(q, k, v, dimensions)
    if callable(feature_map):
        q, k = (_mapped(feature_map, name, x) for name, x in (("q", q), ("k", k)))
        q, k, v = cast_for_autocast(q, k, v)  # autocast lets exp return float32
        check_tensors(q, k, v, dimensions)
    return q, k, v


def _mapped(feature_map: Callable[[Tensor], Tensor], name: str, x: Tensor) -> Tensor:
    y = feature_map(x)
    if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1] or y.dim() != x.dim():
        raise ValueError(
            f"feature_map must return a tensor with all dimensions of {name} {tuple(x.shape)} but "
            f"the last, got {shown(y)}"
        )
    return y


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    mask: Mask | None,
    log_decay: Tensor | None,
    initial_state: LinearState | None,
    state_name: str = "initial_state",
) -> FamilyProblem:
    """Returns the call of `linear_attention` with checked q, k and v, whose features are mapped."""
    shape = shape_of(q, k, v)
    if options.causal and shape.M != shape.N:
        raise ValueError(
            f"causal linear attention needs as many queries as keys, got {shape.M} and {shape.N}"
        )
    key_start, key_end = _key_range(mask, shape)
    decay = _check_decay(log_decay, options, q, (shape.B, shape.H_kv, shape.N))
    S, z = _check_state(state_name, initial_state, shape)
    return FamilyProblem(shape, Inputs(q, k, v, decay, S, z, None, key_start, key_end), options)


def varlen_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    options: Options,
    *,
    log_decay: Tensor | None,
    initial_state: LinearState | None,
) -> FamilyProblem:
    """Returns the call of `linear_attention_varlen`, like `dense_problem`."""
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q and k must share the length, got q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    cu_seqlens, _ = check_offsets(cu_seqlens, q)
    if isinstance(log_decay, Tensor) and log_decay.dim() == 2:
        log_decay = log_decay.mT[None]  # (1, H_kv, total), as in a dense call
    q, k, v = one_entry(q), one_entry(k), one_entry(v)
    shape = shape_of(q, k, v)
    decay = _check_decay(log_decay, options, q, (1, shape.H_kv, shape.N))
    shape = shape._replace(B=cu_seqlens.shape[0] - 1)
    S, z = _check_state("initial_state", initial_state, shape)
    return FamilyProblem(shape, Inputs(q, k, v, decay, S, z, cu_seqlens), options)


def check_offsets(cu_seqlens: Tensor, q: Tensor) -> tuple[Tensor, int | None]:
    """Returns the offsets of packed rows of q in int32, and the end of the last sequence.

    The end is None where values are not read; else they are checked.
    """
    cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, q.device)
    if q.shape[0] >= 1 << 31:
        raise ValueError(f"q must have fewer than 2^31 rows, got {q.shape[0]}")
    end = None
    if values_are_readable(cu_seqlens):
        *_, end = read_starts("cu_seqlens", cu_seqlens, q.shape[0], "q")
    return cu_seqlens.to(torch.int32).contiguous(), end


def decode_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    options: Options,
    *,
    log_decay: Tensor | None,
) -> FamilyProblem:
    """Returns the call of `linear_attention_decode`, like `dense_problem`."""
    if state is None:
        raise TypeError("state must be a LinearState (S, z), got None")
    problem = dense_problem(
        q, k, v, options, mask=None, log_decay=log_decay, initial_state=state, state_name="state"
    )
    for part, x in zip(("S", "z"), state, strict=True):
        if not x.is_contiguous():
            raise ValueError(f"state.{part} must be contiguous, got strides {x.stride()}")
    check_no_gradient(
        {"q": q, "k": k, "v": v, "state.S": state[0], "state.z": state[1], "log_decay": log_decay},
        "linear_attention_decode",
        "or use linear_attention()",
    )
    return problem


def _check_state(
    name: str, state: LinearState | None, shape: Shape
) -> tuple[Tensor | None, Tensor | None]:
    """Returns S and z; raises unless they fit the call."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"{name} must be a LinearState (S, z) or None, got {shown(state)}")
    dtype = shape.accumulate_dtype
    sizes = (shape.B, shape.H_kv, shape.D, shape.D_v)
    for part, x, wanted in zip(("S", "z"), state, (sizes, sizes[:3]), strict=True):
        check_tensor(f"{name}.{part}", x, (dtype,), shape.device)
        if x.shape != wanted:
            raise ValueError(f"{name}.{part} must be {wanted}, got shape {tuple(x.shape)}")
    check_storage((f"{name}.{part}", x) for part, x in zip(("S", "z"), state, strict=True))
    return state[0], state[1]


def _check_decay(
    log_decay: Tensor | None, options: Options, q: Tensor, sizes: tuple[int, int, int]
) -> Tensor | None:
    """Returns the log-decay of every token in the dtype of the state."""
    if log_decay is None:
        return None
    if not options.causal:
        raise ValueError("log_decay requires causal=True: it is a decay by distance")
    dtype = accumulate_dtype(q.dtype)
    check_tensor("log_decay", log_decay, tuple(dict.fromkeys((dtype, q.dtype))), q.device)
    check_storage((("log_decay", log_decay),))
    if log_decay.shape == sizes[1:2]:
        log_decay = log_decay[None, :, None]
    elif log_decay.shape != sizes:
        raise ValueError(
            "log_decay must have one number for each key head, or for each key head and token, "
            f"got shape {tuple(log_decay.shape)} with {sizes[1]} heads and {sizes[2]} tokens"
        )
    return log_decay.to(dtype).expand(sizes)


def _key_range(mask: Mask | None, shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask or None, got {type(mask).__name__}")
    for constraint in mask.constraints:
        if not isinstance(constraint, KeyRange):
            raise ValueError(
                "mask may combine only Mask.padding and Mask.key_range in linear attention, got a "
                f"{type(constraint).__name__} constraint; causal=True is an argument"
            )
    check_mask_tensors(mask, shape.device)
    resolved = resolve(mask, shape.B, shape.H_q, shape.M, shape.N, "top_left")
    return resolved.key_start, resolved.key_end
