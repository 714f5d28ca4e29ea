"""Validation of `attention` calls, before any kernel is launched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transformer_kernels.argument_checks import (
    FLOATS,
    check_int,
    check_number,
    check_tensor,
    shown,
)
from transformer_kernels.masks.mask import Mask
from transformer_kernels.masks.resolved import ResolvedMask, resolve
from transformer_kernels.problem.checks import check_tensors
from transformer_kernels.problem.types import AttentionProblem, TensorArgs
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.storage import check_storage


def build_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    bias: Tensor | Alibi | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    sinks: Tensor | None,
) -> tuple[AttentionProblem, TensorArgs]:
    """Validates a call of `attention`; errors name the argument, its value and what is expected."""
    check_tensors(q, k, v)
    return problem_from_checked(q, k, v, mask, bias, scale, softcap, dropout_p, seed, sinks)


def problem_from_checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    bias: Tensor | Alibi | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    sinks: Tensor | None,
) -> tuple[AttentionProblem, TensorArgs]:
    """Like `build_problem`, for q, k and v that have passed `check_tensors`."""
    B, H_q, M, D = q.shape
    _, H_kv, N, D_v = v.shape
    scores = bias.slopes if isinstance(bias, Alibi) else bias
    if scores is not None or seed is not None or sinks is not None:
        check_storage((("bias", scores), ("seed", seed), ("sinks", sinks)))
    resolved = _resolve_mask(mask, B, H_q, M, N, q.device)
    if bias is not None and not isinstance(bias, Tensor | Alibi):
        raise TypeError(f"bias must be a tensor, alibi(slopes) or None, got {shown(bias)}")
    slopes, alibi_offset = _alibi(bias, q, N)
    if sinks is not None:
        _check_sinks(sinks, q)
    dropout_p = check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    problem = AttentionProblem(
        B=B, H_q=H_q, H_kv=H_kv, M=M, N=N, D=D, D_v=D_v,
        dtype=q.dtype,
        device=q.device,
        scale=_scale(scale, D),
        softcap=_softcap(softcap),
        dropout_p=dropout_p,
        diagonal_low=resolved.diagonal_low,
        diagonal_high=resolved.diagonal_high,
        block_size=resolved.block_size,
        alibi_offset=alibi_offset,
        alibi_slopes_need_grad=slopes is not None and slopes.requires_grad,
    )  # fmt: skip
    tensor_args = TensorArgs(
        bias=_dense_bias(bias, q, N) if isinstance(bias, Tensor) else None,
        alibi_slopes=None if slopes is None else slopes.to(problem.accumulate_dtype),
        seed=_seed(seed, dropout_p, q.device),
        key_start=resolved.key_start,
        key_end=resolved.key_end,
        q_segments=resolved.q_segments,
        k_segments=resolved.k_segments,
        dense=resolved.dense,
        layout=resolved.layout,
    )
    return problem, tensor_args


def _resolve_mask(
    mask: Mask | None, B: int, H: int, M: int, N: int, device: torch.device
) -> ResolvedMask:
    if mask is None:
        return ResolvedMask()
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a Mask or None, got {type(mask).__name__}; "
            "wrap a bool tensor as Mask.dense(tensor)"
        )
    for name, tensor in mask.tensors():
        if tensor.device != device:
            raise ValueError(f"the mask's {name} is on {tensor.device}, q is on {device}")
    check_storage((f"the mask's {name}", tensor) for name, tensor in mask.tensors())
    return resolve(mask, B, H, M, N)


def _alibi(bias: object, q: Tensor, N: int) -> tuple[Tensor | None, int]:
    """Returns (slopes, d) of -slope * |i + d - j|; (None, 0) if the bias is not ALiBi."""
    if not isinstance(bias, Alibi):
        return None, 0
    if bias.slopes.shape != (q.shape[1],):
        raise ValueError(
            f"ALiBi slopes must be (H_q,) = ({q.shape[1]},), got {tuple(bias.slopes.shape)}"
        )
    if bias.slopes.device != q.device:
        raise ValueError(f"ALiBi slopes are on {bias.slopes.device}, q is on {q.device}")
    return bias.slopes, N - q.shape[2] if bias.align == "bottom_right" else 0


def _dense_bias(bias: Tensor, q: Tensor, N: int) -> Tensor:
    check_tensor("bias", bias, (q.dtype, torch.float32), q.device)
    wanted = (*q.shape[:3], N)
    bias = bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
    if bias.dim() != 4 or any(
        have not in (1, want) for have, want in zip(bias.shape, wanted, strict=True)
    ):
        raise ValueError(
            f"bias must broadcast to (B, H_q, M, N) = {wanted}, got {tuple(bias.shape)}"
        )
    return bias


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    check_tensor("sinks", sinks, FLOATS, q.device, "a floating-point tensor")
    if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be (H_q,) = ({q.shape[1]},), got {tuple(sinks.shape)}")


def _scale(scale: float | None, D: int) -> float:
    return 1.0 / math.sqrt(D) if scale is None else check_number("scale", scale)


def _softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    softcap = check_number("softcap", softcap)
    if softcap <= 0.0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    # Neither end changes a score by more than rounding, and float32 holds both: docs/attention.md,
    # section 8.
    return max(softcap, 1e-30) if softcap < 1e30 else 0.0


def _seed(seed: int | Tensor | None, dropout_p: float, device: torch.device) -> Tensor | None:
    if isinstance(seed, Tensor):
        check_tensor("seed", seed, (torch.int64,), device)
        if seed.dim() != 0:
            raise TypeError(f"seed must be an int64 scalar tensor, got shape {tuple(seed.shape)}")
    elif seed is not None:
        check_int("seed", seed, wanted="an int or an int64 scalar tensor")
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(1 << 62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    # torch.tensor would synchronise, and a CUDA graph cannot capture its copy.
    return torch.full((), seed, dtype=torch.int64, device=device)
