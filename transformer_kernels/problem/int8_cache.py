"""Int8 key/value caches: a scale for each token and head. Quantisation, and checks of scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import check_tensor, values_are_readable
from ..common.storage import check_storage
from .pages import by_position
from .types import Problem

_LEVELS = 127
Scales = tuple[Tensor | None, Tensor | None]


def quantized(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 rows, and their float32 scales: x is about scale times row.

    The scale is the row's largest magnitude divided by 127, but not subnormal; 0 if the row is 0.
    Raises ValueError for values that are not finite, or too large for a scale in float32.
    """
    real = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    largest = real.abs().amax(-1)
    smallest = torch.finfo(torch.float32).tiny
    scale = torch.where(largest == 0, largest, (largest / _LEVELS).clamp(min=smallest)).float()
    if values_are_readable(x) and not bool(scale.isfinite().all()):
        at = tuple((~scale.isfinite()).nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be finite, and its scale too in float32, got a row with the largest "
            f"magnitude {float(largest[at])} at {at}"
        )
    divisor = torch.where(scale == 0, 1.0, scale).to(real.dtype)
    return (real / divisor[..., None]).round().to(torch.int8), scale


def are_int8(k_cache: Tensor, v_cache: Tensor, scales: Scales, names: tuple[str, str]) -> bool:
    """Returns whether the caches are int8. Raises unless int8 caches and both scales come together.

    `names` are those of the caches in error messages.
    """
    given = [x is not None for x in scales]
    if given[0] != given[1]:
        missing = "v_scale" if given[0] else "k_scale"
        raise ValueError(f"k_scale and v_scale must be given together, got {missing} None")
    for name, x in zip(names, (k_cache, v_cache), strict=True):
        if given[0]:
            check_tensor(name, x, (torch.int8,), wanted="int8 with k_scale and v_scale")
        elif isinstance(x, Tensor) and x.dtype == torch.int8:
            raise ValueError(f"{name} is int8: it needs k_scale and v_scale, got None")
    return given[0]


def check_scales(k_cache: Tensor, scales: Scales, is_paged: bool) -> None:
    """Raises unless the scales fit the int8 cache, whose shape is checked. Values are not read."""
    dimensions = "pages, H_kv, page_size" if is_paged else "B, H_kv, N"
    for name, x in zip(("k_scale", "v_scale"), scales, strict=True):
        assert x is not None
        check_tensor(name, x, (torch.float32,))
        if x.device != k_cache.device:
            raise ValueError(f"{name} is on {x.device}, the caches are on {k_cache.device}")
        if x.shape != k_cache.shape[:3]:
            raise ValueError(
                f"{name} must be ({dimensions}) = {tuple(k_cache.shape[:3])}, "
                f"got shape {tuple(x.shape)}"
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name} must not require grad: int8 caches have no gradient")
        check_storage(((name, x),))


def check_scale_values(problem: Problem) -> None:
    """Raises ValueError for a scale in use that is negative or not finite. Reads values.

    In use are the positions that some query sees. Where values are not readable, nothing is done.
    """
    layout, mask, N = problem.layout, problem.mask, problem.shape.N
    lengths = layout.cache_seqlens
    if layout.k_scale is None or layout.v_scale is None or lengths is None or problem.shape.M == 0:
        return
    if not all(values_are_readable(x) for x in problem.tensors().values()):
        return
    M, ends = problem.shape.M, lengths.long()[:, None]
    j = torch.arange(N)
    in_use = (j >= ends - M + mask.diagonal_low) & (j < ends + min(mask.diagonal_high, 0))
    if mask.key_start is not None:
        in_use &= j >= mask.key_start[:, None]
    if mask.key_end is not None:
        in_use &= j < mask.key_end[:, None]
    for name, x in (("k_scale", layout.k_scale), ("v_scale", layout.v_scale)):
        scale = by_position(layout, N, x[..., None])[..., 0]
        wrong = ~((scale >= 0) & (scale < torch.inf)) & in_use[:, None]
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be finite and not negative, got {float(scale[at])} at {at}"
            )
