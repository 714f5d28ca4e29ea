"""Score options: how a product q k^T becomes a score and a weight."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from transformer_kernels.argument_checks import check_int, check_number, check_tensor, shown
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.storage import check_storage


class ScoreOptions(NamedTuple):
    """Validated score options. Annotations give shapes and layouts: see `problem.fields`.

    s = softcap tanh(scale q k^T / softcap) + bias - slope |i + alibi_offset - j|
    """

    scale: float | None = None
    """None: 1/sqrt(D)."""
    softcap: float = 0.0
    """0: no softcap."""
    dropout_p: Annotated[float, "", "dense varlen"] = 0.0
    bias: Annotated[Tensor | None, "(1|B, 1|H_q, 1|M, 1|N)", "dense"] = None
    """q's dtype or float32."""
    alibi_slopes: Annotated[Tensor | None, "(H_q)", "dense varlen cache"] = None
    """float32; float64 for float64 inputs."""
    alibi_offset: int = 0
    """Relative to the origin of the mask's diagonals, which `ResolvedMask.bottom_right` selects."""
    seed: Annotated[Tensor | None, "()", "dense varlen"] = None
    """int64; present if and only if dropout_p > 0."""


PLAIN_SCORES = ScoreOptions()


class ScoreArguments(TypedDict, total=False):
    """Arguments of the public operators from which `check_scores` makes `ScoreOptions`."""

    bias: Tensor | Alibi | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    seed: int | Tensor | None


def check_scores(
    q: Tensor, N: int, *, bottom_right: bool = False, **arguments: Unpack[ScoreArguments]
) -> ScoreOptions:
    """Validates the score arguments of a call with N keys; errors name the argument and its value.

    Args:
        q: (B, H_q, M, D), validated.
        N: keys.
        bottom_right: origin of the mask's diagonals, to which the ALiBi offset is relative.
        arguments: as given by the caller.
    """
    bias, seed = arguments.get("bias"), arguments.get("seed")
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    if bias is not None or seed is not None:
        check_storage((("bias", bias if slopes is None else slopes), ("seed", seed)))
    if not isinstance(bias, Tensor | Alibi | None):
        raise TypeError(f"bias must be a tensor, alibi(slopes) or None, got {shown(bias)}")
    options = ScoreOptions(
        scale=_scale(arguments.get("scale")),
        softcap=_softcap(arguments.get("softcap")),
        dropout_p=_dropout(arguments.get("dropout_p", 0.0)),
    )
    if isinstance(bias, Alibi):
        options = options._replace(
            alibi_slopes=_alibi_slopes(bias.slopes, q),
            alibi_offset=bias.offset(q.shape[2], N) - (N - q.shape[2] if bottom_right else 0),
        )
    elif bias is not None:
        options = options._replace(bias=_dense_bias(bias, q, N))
    seed = _seed(seed, options.dropout_p, q.device)
    return options if seed is None else options._replace(seed=seed)


def _scale(scale: float | None) -> float | None:
    return None if scale is None else check_number("scale", scale)


def _softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    softcap = check_number("softcap", softcap)
    if softcap <= 0.0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    # Neither end changes a score by more than rounding, and float32 holds both: docs/attention.md,
    # section 8.
    return max(softcap, 1e-30) if softcap < 1e30 else 0.0


def _dropout(dropout_p: float) -> float:
    dropout_p = check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    return dropout_p


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


def _alibi_slopes(slopes: Tensor, q: Tensor) -> Tensor:
    if slopes.shape != (q.shape[1],):
        raise ValueError(
            f"ALiBi slopes must be (H_q,) = ({q.shape[1]},), got {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"ALiBi slopes are on {slopes.device}, q is on {q.device}")
    return slopes.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


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
