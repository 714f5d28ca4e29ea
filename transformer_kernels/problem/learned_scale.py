"""A scale that is a tensor, with a gradient: it becomes a factor of the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.argument_checks import check_tensor
from ..common.storage import check_storage
from .checks import DTYPES


def scaled_queries(q: Tensor, scale: float | Tensor | None) -> tuple[Tensor, float | None]:
    """Returns (scale q, 1) if the scale is a tensor, else (q, scale).

    The product has one rounding to q's dtype. Raises for a scale that is not one element in q's
    dtype or float32, on q's device.
    """
    if not isinstance(scale, Tensor):
        return q, scale
    check_learned_scale(q, scale)
    # Not a scalar tensor, which torch would round to q's dtype before the product.
    return (q * scale.reshape(1).to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype), 1.0


def check_learned_scale(q: Tensor, scale: Tensor) -> None:
    check_storage((("q", q), ("scale", scale)))
    check_tensor("q", q, DTYPES)
    check_tensor("scale", scale, (q.dtype, torch.float32), q.device)
    if scale.numel() != 1:
        raise ValueError(f"scale must have one element, got shape {tuple(scale.shape)}")
