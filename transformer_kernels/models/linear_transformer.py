"""Linear Transformer: a language model whose time is linear, and which generates as a recurrence.

Source: Transformers are RNNs (Katharopoulos et al., 2020, arXiv:2006.16236).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..linear.types import LinearState
from ..nn.attention import size_of_heads
from ..nn.blocks import SelfAttentionBlock, Stack, normal_weights, smaller_branch_ends
from ..nn.linear_attention import LinearSelfAttention
from ..nn.options import AttnImplementation, check_fields
from ..nn.positions import RowColumnPositions
from .generation import State

Positions = Literal["learned", "decay"]
"""learned: vectors of the position are added to the embedding. decay: heads forget at fixed rates
instead, and positions are relative; see `LinearSelfAttention`."""


@dataclass(frozen=True, kw_only=True)
class LinearTransformerConfig:
    """Hyperparameters of a `LinearTransformer`."""

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    hidden: int | None = None
    """Inner width of the feed-forward networks; 4 * width if None"""
    vocabulary: int = 256
    """Number of tokens; 256 for bytes"""
    context: int
    """Length of training texts in tokens; texts may be longer, see `LinearTransformer`"""
    dropout: float = 0.0
    """Probability of dropping an element of an embedding or of a layer's output"""
    positions: Positions = "learned"
    """Vectors added to the embedding (learned), or heads that forget (decay)"""
    columns: int | None = None
    """Positions of a row in the table of row and column encodings; None for one row"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)


SIZES = {
    "copy": LinearTransformerConfig(layers=2, heads=4, width=64, vocabulary=128, context=64),
    "recall": LinearTransformerConfig(layers=4, heads=2, width=64, vocabulary=64, context=64),
    "demo": LinearTransformerConfig(
        layers=4, heads=4, width=96, context=1024, positions="decay",
    ),
    "learned": LinearTransformerConfig(layers=4, heads=4, width=96, context=64),
}  # fmt: skip
"""Named sizes. Tokens of "demo" and "learned" are bytes. "copy" is for texts of two copies,
"recall" for texts of keys and values. In a short training, learned positions need short texts."""


class LinearTransformer(nn.Module):
    """Linear Transformer language model: logits of the next token at every position of a text.

    A text may be read in parts of any length. The state between them has the same size after any
    number of tokens, and the logits are those of the whole text:

        state = model.new_state(batch)
        for part in parts:  # (B, T) each
            logits, state = model(part, state)

    To generate text, see `models.generation.generate`. A text may be longer than the context in
    training: the rows of learned position encodings repeat (`RowColumnPositions`), and a decay does
    not depend on positions.

    `attn_implementation` is "eager" or "fused"; "sdpa" raises ValueError.
    """

    def __init__(
        self, config: LinearTransformerConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions: RowColumnPositions | None = None
        if config.positions == "learned":
            columns = config.columns or config.context
            rows = -(-config.context // columns)
            self.positions = RowColumnPositions(rows, columns, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(_block(config, attn_implementation) for _ in range(config.layers))
        self.last_norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)
        # phi(x) is nearly 1 for the small queries and keys of `normal_weights`: all keys then have
        # nearly the same weight, and training starts with a long plateau.
        for attention in self._attentions():
            for layer in (attention.queries, attention.keys):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    @property
    def context(self) -> int:
        return self.config.context

    def new_state(self, batch: int) -> State:
        """Returns the state before the first token of `batch` texts.

        It holds the number of tokens so far, (B,) int64, and S and z of each layer (`LinearState`),
        in float32, or float64 for a model in float64.
        """
        count = self.embedding.weight.new_zeros(batch, dtype=torch.int64)
        state: list[Tensor] = [count]
        for attention in self._attentions():
            state.extend(attention.new_state(batch))
        return tuple(state)

    @overload
    def forward(self, tokens: Tensor) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]: ...

    def forward(self, tokens: Tensor, state: State | None = None) -> Tensor | tuple[Tensor, State]:
        """Computes logits of the next token at every position, and the state if one is given.

        Args:
            tokens: (B, T) int64, which follow those of the state; any T.
            state: state after the tokens before, which stays as it is. For inference: with a state,
                attention has no gradient.

        Returns:
            logits (B, T, vocabulary), whose row t depends on the earlier tokens and tokens 0 to t
            only; with a state, also the state after the last token.

        Raises:
            ValueError: the state is not one of this model and batch.
        """
        if state is None:
            x = self._embedded(tokens, 0)
            for block in self.blocks:
                x = self.blocks.run(block, x)
            return self._logits(x)
        self._check_state(state, tokens.shape[0])
        count, *parts = (part.clone() for part in state)
        x = self._embedded(tokens, count[:, None])
        for n, block in enumerate(self.blocks):
            x = block(x, state=LinearState(parts[2 * n], parts[2 * n + 1]))
        return self._logits(x), (count + tokens.shape[1], *parts)

    def _attentions(self) -> Iterator[LinearSelfAttention]:
        for block in self.blocks:
            assert isinstance(block.attention, LinearSelfAttention)
            yield block.attention

    def _embedded(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = self.positions(x, start=start)
        y: Tensor = self.dropout(x)
        return y

    def _logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.logits(self.last_norm(x))
        return y

    def _check_state(self, state: State, batch: int) -> None:
        shapes = [tuple(part.shape) for part in state]
        D = self.config.width // self.config.heads
        S = (batch, self.config.heads, D, D)
        expected = [(batch,), *(S, S[:3]) * self.config.layers]
        if shapes != expected:
            raise ValueError(f"state must have the shapes {expected}, got {shapes}")


def _block(
    config: LinearTransformerConfig, attn_implementation: AttnImplementation
) -> SelfAttentionBlock:
    decay = config.positions == "decay"
    attention = LinearSelfAttention(
        config.width, config.heads, decay=decay, attn_implementation=attn_implementation
    )
    return SelfAttentionBlock(
        attention, config.width, norm="pre", hidden=config.hidden, dropout=config.dropout
    )
