"""Gated DeltaNet, a hybrid: three layers of the delta rule, then one of attention, and so on.

Sources: Gated Delta Networks (Yang et al., 2024, arXiv:2412.06464). The ratio is that of
Qwen3-Next. Attention has no position encoding, as in Kimi Linear (arXiv:2510.26692): the delta rule
knows the order of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import KVCache, MultiHeadAttention, size_of_heads
from ..nn.blocks import SelfAttentionBlock, Stack, normal_weights, smaller_branch_ends
from ..nn.delta_attention import DeltaState, GatedDeltaRuleAttention
from ..nn.linear_attention import LinearImplementation
from ..nn.options import AttnImplementation, check_choice, check_fields


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Hyperparameters of a `GatedDeltaNet`."""

    layers: int
    """Number of blocks"""
    heads: int
    """Number of heads in every layer"""
    width: int
    """Model width (embedding dimension)"""
    hidden: int | None = None
    """Inner width of the feed-forward networks; 4 * width if None"""
    vocabulary: int = 256
    """Number of tokens; 256 for bytes"""
    context: int
    """Length of training texts in tokens; texts may be longer"""
    dropout: float = 0.0
    """Probability of dropping an element of an embedding or of a layer's output"""
    attention_every: int = 4
    """Layers from one attention layer to the next, which is the last of them; 0 for no attention"""

    def __post_init__(self) -> None:
        check_fields(self, may_be_zero=("attention_every",))
        size_of_heads(self.width, self.heads)


SIZES = {
    "demo": GatedDeltaNetConfig(layers=4, heads=4, width=96, context=1024),
    "recall": GatedDeltaNetConfig(
        layers=4, heads=2, width=64, vocabulary=64, context=64, attention_every=0
    ),
}
"""Named sizes. Tokens of "demo" are bytes. "recall" is for texts of keys and values, and has no
attention, which could find the values by itself."""


@dataclass(frozen=True)
class HybridState:
    """State of a `GatedDeltaNet` after the tokens of a text so far."""

    delta: tuple[DeltaState, ...]
    """The state of each layer of the delta rule, of constant size"""
    cache: KVCache | None
    """Keys and values of the attention layers, which grow with the text; None without attention"""


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet language model: logits of the next token at every position of a text.

    A text of any length may be read in parts, with the logits of the whole text:

        state = model.new_state(batch)
        for part in parts:  # (B, T) each
            logits, state = model(part, state)

    To generate text, see `models.generation.generate`. `attn_implementation` is "eager" or "fused";
    "sdpa" raises ValueError.
    """

    def __init__(
        self, config: GatedDeltaNetConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        check_choice("attn_implementation", attn_implementation, LinearImplementation)
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(_block(config, n, attn_implementation) for n in range(config.layers))
        self.last_norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)

    @property
    def context(self) -> int:
        return self.config.context

    def new_state(self, batch: int) -> HybridState:
        """Returns the state before the first token of `batch` texts.

        The state of the delta rule is float32, or float64 for a model in float64. The cache starts
        with the capacity of the context, and at least doubles it when it is full.
        """
        weight, config = self.embedding.weight, self.config
        delta = tuple(
            block.attention.new_state(batch)
            for block in self.blocks
            if isinstance(block.attention, GatedDeltaRuleAttention)
        )
        if len(delta) == config.layers:
            return HybridState(delta, None)
        cache = KVCache(
            layers=config.layers - len(delta), batch=batch, heads=config.heads,
            capacity=config.context, head_size=config.width // config.heads,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        return HybridState(delta, cache)

    @overload
    def forward(self, tokens: Tensor) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, state: HybridState) -> tuple[Tensor, HybridState]: ...

    def forward(
        self, tokens: Tensor, state: HybridState | None = None
    ) -> Tensor | tuple[Tensor, HybridState]:
        """Computes logits of the next token at every position, and the state if one is given.

        Args:
            tokens: (B, T) int64, which follow those of the state; any T.
            state: state after the tokens before. It is updated in place. For inference: with a
                state, no layer but the feed-forward networks has a gradient.

        Returns:
            logits (B, T, vocabulary), whose row t depends on the earlier tokens and tokens 0 to t
            only; with a state, also the state.

        Raises:
            ValueError: the state is not one of this model and batch.
        """
        x: Tensor = self.dropout(self.embedding(tokens))
        if state is None:
            for block in self.blocks:
                is_delta = isinstance(block.attention, GatedDeltaRuleAttention)
                x = self.blocks.run(block, x, **({} if is_delta else {"mask": Mask.causal()}))
            return self._logits(x)
        self._check_state(state, tokens.shape[0])
        if state.cache is not None:
            state.cache.reserve(tokens.shape[1])
            state.cache.extend(tokens.shape[1])
        delta, attentions = iter(state.delta), 0
        for block in self.blocks:
            if isinstance(block.attention, GatedDeltaRuleAttention):
                x = block(x, state=next(delta))
            else:
                assert state.cache is not None
                x = block(x, cache=state.cache.layer(attentions))
                attentions += 1
        return self._logits(x), state

    def _logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.logits(self.last_norm(x))
        return y

    def _check_state(self, state: HybridState, batch: int) -> None:
        keys = None if state.cache is None else tuple(state.cache.keys.shape[:3])
        found = [tuple(one.S.shape[:2]) for one in state.delta], keys
        every, layers, heads = self.config.attention_every, self.config.layers, self.config.heads
        attentions = layers // every if every else 0
        keys = (attentions, batch, heads) if attentions else None
        expected = [(batch, heads)] * (layers - attentions), keys
        if found != expected:
            raise ValueError(
                "state must have S (batch, heads, ...) of each layer of the delta rule and keys "
                f"(layers, batch, heads, ...) of the sizes {expected}, got {found}"
            )


def _block(
    config: GatedDeltaNetConfig, n: int, attn_implementation: AttnImplementation
) -> SelfAttentionBlock:
    every = config.attention_every
    kind = MultiHeadAttention if every and n % every == every - 1 else GatedDeltaRuleAttention
    attention = kind(config.width, config.heads, attn_implementation=attn_implementation)
    return SelfAttentionBlock(
        attention, config.width, norm="pre", hidden=config.hidden, dropout=config.dropout
    )
