"""Scores by distance as a dense bias, by plain torch: what `relative_keys` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transformer_kernels import RelativeKeys


def causal_bias(q: Tensor, relative: RelativeKeys, scale: float) -> Tensor:
    """Returns scale q_i r_e + t_e, e = i + N - M - j, as a view of a product.

    Distances after the diagonal are not computed, which halves the product of N = M: elements with
    e < 0 are those of other rows and must be masked.

    Args:
        q: queries (B, H, M, D).
        relative: keys (H, N, D) of the distances 0 to N - 1, and their table, if it has one.
        scale: factor of the products.

    Returns:
        (B, H, M, N).
    """
    q, keys = q * scale, relative.keys
    if relative.table is not None:
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        keys = torch.cat([keys, relative.table[..., None].to(keys.dtype)], dim=-1)
    M, N = q.shape[2], keys.shape[1]
    # Column x has distance N - 1 - x. Rows of N + 1, read as rows of N, are shifted by one each.
    products = q @ nn.functional.pad(keys.flip(1), (0, 0, 0, 1)).mT
    bias: Tensor = products.flatten(2)[..., M - 1 : M - 1 + M * N].unflatten(2, (M, N))
    return bias
