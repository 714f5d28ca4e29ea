"""A table of facts, looked up by how similar a query is to its keys.

The hard way takes the value of the most similar key, and no gradient reaches the keys; the soft
way, which is attention, takes all values, weighted by how similar their keys are. Source: the page
"Transformers", sections "Information Lookup" and "Self Attention"; there similarities are not
scaled, and nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transformer_kernels.masks.mask import Mask
from transformer_kernels.nn.attention import attend
from transformer_kernels.nn.options import AttnImplementation, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class FactTableConfig:
    """What decides the weights and the function of a `FactTable`.

    The similarity of a query and a key is their dot product; `scaled` divides it by sqrt(width), as
    attention does, which keeps the softmax from saturating where the width is large. A hard lookup
    is the same either way.
    """

    rows: int
    width: int
    value_width: int
    scaled: bool = False

    def __post_init__(self) -> None:
        check_positive("rows", self.rows)
        check_positive("width", self.width)
        check_positive("value_width", self.value_width)


class FactTable(nn.Module):
    """`rows` keys and their values, both learned.

    `attn_implementation` selects how the soft lookup is computed, not its result.
    """

    def __init__(
        self, config: FactTableConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        self.config = config
        self.attn_implementation = attn_implementation
        self.keys = nn.Parameter(torch.randn(config.rows, config.width))
        self.values = nn.Parameter(torch.randn(config.rows, config.value_width))

    def hard(self, queries: Tensor) -> Tensor:
        """queries (B, M, width) or (M, width) -> the value of the key most similar to each,
        (B, M, value_width) or (M, value_width).

        Of equally similar keys it takes the first. Differentiable in the values alone: neither the
        keys nor the queries get a gradient.
        """
        self._check(queries)
        with torch.no_grad():
            row = (queries @ self.keys.mT).argmax(dim=-1)
        return self.values[row]

    def soft(self, queries: Tensor, mask: Mask | None = None) -> Tensor:
        """queries (B, M, width) or (M, width) -> the values, weighted by the softmax of how similar
        their keys are, (B, M, value_width) or (M, value_width).

        The mask says which rows each query may see: `Mask.dense` of a bool tensor (M, rows), for
        instance. A query that sees none gets 0.
        """
        self._check(queries)
        batch = queries if queries.dim() == 3 else queries[None]
        B = batch.shape[0]
        o = attend(
            batch[:, None],
            self.keys.expand(B, 1, -1, -1),
            self.values.expand(B, 1, -1, -1),
            mask=mask,
            scale=None if self.config.scaled else 1.0,
            attn_implementation=self.attn_implementation,
        )[:, 0]
        return o if queries.dim() == 3 else o[0]

    def forward(self, queries: Tensor, mask: Mask | None = None) -> Tensor:
        """The soft way."""
        return self.soft(queries, mask)

    def _check(self, queries: Tensor) -> None:
        if queries.dim() not in (2, 3) or queries.shape[-1] != self.config.width:
            width = self.config.width
            raise ValueError(
                f"queries must be (B, M, {width}) or (M, {width}), got shape {tuple(queries.shape)}"
            )
