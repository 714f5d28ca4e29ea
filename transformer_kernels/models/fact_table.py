"""Table of facts with learned keys and values, queried by hard or soft lookup.

Hard lookup returns the value of the most similar key; the keys get no gradient. Soft lookup is
attention: all values, weighted by the softmax of the similarities. Source: the page "Transformers",
sections "Information Lookup" and "Self Attention". In the source, similarities are not scaled and
nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..dispatch.division import check_undivided
from ..masks.mask import Mask
from ..nn.attention import attend
from ..nn.options import AttnImplementation, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class FactTableConfig:
    """Hyperparameters of a `FactTable`.

    The similarity of a query and a key is their dot product. `scaled` divides it by sqrt(width), as
    attention does, so that the softmax does not saturate at large widths. Scaling does not affect
    hard lookup.
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
    """Table of `rows` learned keys and values.

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result of soft lookup
    beyond rounding.
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
        """Hard lookup: the value of the key most similar to each query.

        Ties go to the first key. Only the values get a gradient, not the keys or the queries.

        Args:
            queries: (B, M, width) or (M, width).

        Returns:
            (B, M, value_width) or (M, value_width).

        Raises:
            ValueError: queries have another shape.
        """
        self._check(queries)
        with torch.no_grad():
            row = (queries @ self.keys.mT).argmax(dim=-1)
        return self.values[row]

    def soft(self, queries: Tensor, mask: Mask | None = None) -> Tensor:
        """Soft lookup: the values, weighted by the softmax of the similarities of their keys.

        Args:
            queries: (B, M, width) or (M, width).
            mask: the rows visible to each query, for example `Mask.dense` of a bool tensor
                (M, rows). A fully masked query gets 0.

        Returns:
            (B, M, value_width) or (M, value_width).

        Raises:
            ValueError: queries have another shape, or the mask does not match (M, rows).
        """
        check_undivided("FactTable.soft")
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
        """Soft lookup."""
        return self.soft(queries, mask)

    def _check(self, queries: Tensor) -> None:
        if queries.dim() not in (2, 3) or queries.shape[-1] != self.config.width:
            width = self.config.width
            raise ValueError(
                f"queries must be (B, M, {width}) or (M, {width}), got shape {tuple(queries.shape)}"
            )
