"""Score options: how a product q k^T becomes a score and a weight."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from ..common.argument_checks import check_int, check_number, check_tensor, shown
from ..common.storage import check_storage
from .alibi import Alibi
from .relative import Relative, RelativeBias, RelativeKeys, alibi_by_distance


class ScoreOptions(NamedTuple):
    """Validated score options. Annotations give shapes and layouts: see `problem.fields`.

    s = softcap tanh(scale q (k + r)^T / softcap) + bias - slope |i + alibi_offset - j|
        + relative_bias at distance i + d - j, where r is relative_keys at the same distance
    """

    scale: float | None = None
    """None: 1/sqrt(D)."""
    softcap: float = 0.0
    """0: no softcap."""
    dropout_p: Annotated[float, "", "dense varlen"] = 0.0
    dropout_row: Annotated[int, "", "dense"] = 0
    """Row of query 0 in the dropout mask, a multiple of 16. Code that divides a call sets it and
    the next two for the parts; public operators have no such arguments."""
    dropout_column: Annotated[int, "", "dense"] = 0
    """Column of key 0, a multiple of 16."""
    dropout_head: Annotated[int, "", "dense"] = 0
    """Head of query head 0."""
    bias: Annotated[Tensor | None, "(1|B, 1|H_q, 1|M, 1|N)", "dense"] = None
    """q's dtype or float32."""
    alibi_slopes: Annotated[Tensor | None, "(1|S, H_q)", "dense varlen cache"] = None
    """float32; float64 for float64 inputs. S is the number of sequences: B, or that of the packed
    sequences."""
    alibi_offset: int = 0
    """Relative to the origin of the mask's diagonals, which `ResolvedMask.bottom_right` selects."""
    relative_bias: Annotated[Tensor | None, "(1|H_q, distances)", "dense varlen cache"] = None
    """float32; float64 for float64 inputs. A value for each of the M + N - 1 distances i + d - j,
    in ascending order. Packed sequences and caches: for the upper bounds M and N, and with the d of
    the mask's origin; in a dense call every d gives the same table."""
    relative_keys: Annotated[Tensor | None, "(1|H_q, distances, D)", "dense varlen cache"] = None
    """q's dtype; distances as for `relative_bias`."""
    seed: Annotated[Tensor | None, "()", "dense varlen"] = None
    """int64; present if and only if dropout_p > 0."""


PLAIN_SCORES = ScoreOptions()

DIFFERENTIABLE = ("bias", "relative_bias", "relative_keys")
"""Options whose gradients the backward kernels compute on demand."""


class SharedScoreArguments(TypedDict, total=False):
    """Arguments that all public operators share, with the same types."""

    relative: Relative | None
    softcap: float | None


class ScoreArguments(SharedScoreArguments, total=False):
    """Arguments of the public operators from which `check_scores` makes `ScoreOptions`."""

    bias: Tensor | Alibi | None
    scale: float | None
    dropout_p: float
    seed: int | Tensor | None


def check_scores(
    q: Tensor,
    M: int,
    N: int,
    *,
    sequences: int | None = None,
    bottom_right: bool = False,
    **arguments: Unpack[ScoreArguments],
) -> ScoreOptions:
    """Validates the score arguments of a call; errors name the argument and its value.

    ALiBi slopes that require grad become a table by distance, which kernels differentiate.

    Args:
        q: (B, H_q, rows, D), validated.
        M: queries; of packed sequences the upper bound of their number, like N.
        N: keys.
        sequences: number of packed sequences. Default: B.
        bottom_right: origin of the mask's diagonals, to which the ALiBi offset is relative.
        arguments: as given by the caller.
    """
    # Compiled code would take numbers that are defaults as inputs, not as constants.
    if _are_plain(arguments) and not torch.compiler.is_compiling():
        scale = arguments.get("scale")
        return PLAIN_SCORES if scale is None else ScoreOptions(_scale(scale))
    bias, relative = arguments.get("bias"), arguments.get("relative")
    _check_types(bias, relative, arguments.get("seed"))
    options = ScoreOptions(
        scale=_scale(arguments.get("scale")),
        softcap=_softcap(arguments.get("softcap")),
        dropout_p=_dropout(arguments.get("dropout_p", 0.0)),
    )
    if isinstance(bias, Alibi):
        slopes = _alibi_slopes(bias.slopes, q, q.shape[0] if sequences is None else sequences)
        if slopes.requires_grad and torch.is_grad_enabled():
            table = alibi_by_distance(slopes[0], bias.align, M, N)
            options = options._replace(relative_bias=table)
        else:
            offset = bias.offset(M, N) - (N - M if bottom_right else 0)
            options = options._replace(alibi_slopes=slopes, alibi_offset=offset)
    elif bias is not None:
        options = options._replace(bias=_dense_bias(bias, q, N))
    if isinstance(relative, RelativeKeys):
        options = options._replace(relative_keys=_keys(relative, q, M, N))
        relative = relative.bias
    if relative is not None:
        table, other = _table(relative, q, M, N), options.relative_bias
        options = options._replace(relative_bias=table if other is None else table + other)
    seed = _seed(arguments.get("seed"), options.dropout_p, q.device)
    return options if seed is None else options._replace(seed=seed)


def drawn_seed(device: torch.device) -> Tensor:
    """Draws a dropout seed from torch's generator of the device, without synchronising."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device=device)


def _are_plain(arguments: ScoreArguments) -> bool:
    """True if no option is given but a scale. The default of an option without a rule here, other
    than None, counts as given."""
    for name, x in arguments.items():
        is_default = x is None or (name == "dropout_p" and type(x) is float and x == 0.0)
        if not is_default and name != "scale":
            return False
    return True


def _check_types(bias: object, relative: object, seed: object) -> None:
    """Raises for biases of other types, and for tensors whose memory is freed or misaligned."""
    if bias is relative is seed is None:
        return
    bias = bias.slopes if (is_alibi := isinstance(bias, Alibi)) else bias
    table = relative.table if isinstance(relative, Relative) else None
    keys = relative.keys if isinstance(relative, RelativeKeys) else None
    named = (("the table of relative", table), ("the keys of relative", keys))
    check_storage((("bias", bias), *named, ("seed", seed)))
    if not (is_alibi or isinstance(bias, Tensor | None)):
        raise TypeError(f"bias must be a tensor, alibi(slopes) or None, got {shown(bias)}")
    if not isinstance(relative, Relative | None):
        raise TypeError(
            "relative must be relative_bias(table), relative_keys(keys) or None, "
            f"got {shown(relative)}"
        )


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


def _alibi_slopes(slopes: Tensor, q: Tensor, sequences: int) -> Tensor:
    """Returns slopes (1, H_q) or (S, H_q), in the dtype of the softmax statistics."""
    heads = q.shape[1]
    wanted = (sequences, heads) if slopes.dim() == 2 else (heads,)
    if slopes.shape != wanted:
        raise ValueError(
            f"ALiBi slopes must be (H_q,) = ({heads},) or (B, H_q) = ({sequences}, {heads}), "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"ALiBi slopes are on {slopes.device}, q is on {q.device}")
    if slopes.dim() == 2 and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "ALiBi slopes (B, H_q) must not require grad: only slopes (H_q,) have a gradient"
        )
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return slopes.to(_statistics_dtype(q))


def _table(relative: RelativeBias, q: Tensor, M: int, N: int) -> Tensor:
    """Returns the table of all distances, in the dtype of the softmax statistics."""
    table, heads = relative.table, q.shape[1]
    if table.shape[0] not in (1, heads):
        raise ValueError(
            f"the table of relative must be (H_q or 1, E) with H_q = {heads}, "
            f"got shape {tuple(table.shape)}"
        )
    if table.device != q.device:
        raise ValueError(f"the table of relative is on {table.device}, q is on {q.device}")
    return relative.by_distance(M, N, _statistics_dtype(q))


def _keys(relative: RelativeKeys, q: Tensor, M: int, N: int) -> Tensor:
    """Returns the keys of all distances, in q's dtype."""
    keys, heads, width = relative.keys, q.shape[1], q.shape[3]
    if keys.shape[0] not in (1, heads) or keys.shape[2] != width:
        raise ValueError(
            f"the keys of relative must be (H_q or 1, E, D) with H_q = {heads} and D = {width}, "
            f"got shape {tuple(keys.shape)}"
        )
    if keys.device != q.device:
        raise ValueError(f"the keys of relative are on {keys.device}, q is on {q.device}")
    return relative.by_distance(M, N, q.dtype)


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


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
        return drawn_seed(device)
    if isinstance(seed, Tensor):
        return seed
    # torch.tensor would synchronise, and a CUDA graph cannot capture its copy.
    return torch.full((), seed, dtype=torch.int64, device=device)
