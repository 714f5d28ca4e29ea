"""Transformer-XL: a language model with relative positions that carries memories across segments.

A text is read in segments. The inputs of every layer are kept as memories, which the next segment
attends to without a gradient. Source: Transformer-XL: Attentive Language Models beyond a
Fixed-Length Context (Dai et al., 2019, arXiv:1901.02860).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import size_of_heads
from ..nn.blocks import STD, Norm, Stack, normal_weights
from ..nn.options import AttnImplementation, check_fields, check_not_negative
from ..nn.positions import distance_sinusoids
from ..nn.relative_attention import RelativeBlock

Memories = tuple[Tensor, ...]
"""For each layer, its inputs at the last positions: (B, length, width), without a gradient."""


def _check_memory(memory: int, same_length: bool) -> None:
    check_not_negative("memory", memory)
    if same_length and memory == 0:
        raise ValueError("memory must be at least 1 with same_length, whose window it is, got 0")


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """Hyperparameters of a `TransformerXL`.

    `context`, `memory`, `clamp` and `same_length` do not affect the parameters. The paper
    evaluates with a longer memory than in training, and with the last two; see `TransformerXL`.
    """

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    head_size: int | None = None
    """Size of a head; width / heads if None"""
    hidden: int | None = None
    """Inner width of the feed-forward networks; 4 * width if None"""
    vocabulary: int = 256
    """Number of tokens; 256 for bytes"""
    context: int
    """Length of a segment in tokens"""
    memory: int
    """Number of tokens before a segment that are kept as memory; 0 for none"""
    dropout: float = 0.1
    """Dropout probability in training"""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight"""
    norm: Norm = "post"
    """Normalisation after each residual sum (post) or before each layer (pre)"""
    tied_biases: bool = True
    """True if all layers share u and v"""
    clamp: int | None = None
    """Largest distinct distance; larger ones have its encoding"""
    same_length: bool = False
    """True if every query sees `memory` keys, itself included, rather than all before it"""

    def __post_init__(self) -> None:
        check_fields(self, may_be_zero=("memory",))
        _check_memory(self.memory, self.same_length)
        self.size_of_a_head()

    def size_of_a_head(self) -> int:
        """`head_size`, or width / heads if that is None."""
        if self.head_size is not None:
            return self.head_size
        return size_of_heads(self.width, self.heads)


SIZES = {
    "enwik8-base": TransformerXLConfig(
        layers=12, heads=8, width=512, hidden=2048, context=512, memory=512,
    ),
    "enwik8-large": TransformerXLConfig(
        layers=24, heads=8, width=1024, hidden=3072, context=768, memory=768,
        dropout=0.15, attention_dropout=0.15,
    ),
    "wt103-base": TransformerXLConfig(
        layers=16, heads=10, width=410, head_size=41, hidden=2100, vocabulary=267_735,
        context=150, memory=150,
    ),
    "wt103-large": TransformerXLConfig(
        layers=18, heads=16, width=1024, hidden=4096, vocabulary=267_735,
        context=384, memory=384, dropout=0.2, attention_dropout=0.2,
    ),
}  # fmt: skip
"""Published sizes by name. Tokens of enwik8 are bytes. The published models of WikiText-103 have an
adaptive softmax and adaptive embeddings, which this model does not: its softmax is over the whole
vocabulary."""


class TransformerXL(nn.Module):
    """Transformer-XL language model: logits of the next token, with memories of earlier segments.

    The token embedding and the projection to logits share one weight. The caller holds the state:

        memories = None
        for segment in segments:  # (B, M) each
            logits, memories = model(segment, memories)

    To evaluate with other options than in training, replace the config, which is read by each call:

        model.config = dataclasses.replace(model.config, memory=2100, clamp=820, same_length=True)

    To generate text, see `models.generation.generate`.
    """

    def __init__(
        self, config: TransformerXLConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        sets = 1 if config.tied_biases else config.layers
        shape = (sets, config.heads, config.size_of_a_head())
        self.content_bias = nn.Parameter(torch.empty(shape))
        """u: (1 or layers, heads, head_size)"""
        self.position_bias = nn.Parameter(torch.empty(shape))
        """v: (1 or layers, heads, head_size)"""
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            RelativeBlock(
                config.width, config.heads, config.size_of_a_head(),
                norm=config.norm, hidden=config.hidden, dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.logits_bias = nn.Parameter(torch.zeros(config.vocabulary))
        normal_weights(self)
        nn.init.normal_(self.content_bias, std=STD)
        nn.init.normal_(self.position_bias, std=STD)

    @property
    def context(self) -> int:
        return self.config.context

    def new_state(self, batch: int) -> Memories:
        """Returns the memories before the first token: one empty tensor for each layer."""
        empty = self.embedding.weight.new_empty(batch, 0, self.config.width)
        return (empty,) * self.config.layers

    def forward(
        self, tokens: Tensor, memories: Memories | None = None, *, memory: int | None = None
    ) -> tuple[Tensor, Memories]:
        """Computes logits of the next token at every position, and the memories after the segment.

        Args:
            tokens: (B, M) int64, which follow the positions of the memories; any M >= 1.
            memories: result of the previous call, all of it visible; None or empty at the start of
                a text.
            memory: number of positions to keep in the new memories; `config.memory` unless given.

        Returns:
            logits (B, M, vocabulary), whose row t depends on the memories and tokens 0 to t only,
            and the memories of the last `memory` positions, fewer at the start of a text.

        Raises:
            ValueError: a memory has the wrong shape, or `memory` is negative.
        """
        config = self.config
        memory = config.memory if memory is None else memory
        _check_memory(memory, config.same_length)
        memories = self.new_state(tokens.shape[0]) if memories is None else memories
        self._check_memories(memories, tokens.shape[0])
        x: Tensor = self.dropout(self.embedding(tokens) * config.width**0.5)
        encodings = self.dropout(self._encodings(memories[0].shape[1] + tokens.shape[1], x))
        mask = Mask.window(memory - 1 if config.same_length else None, 0, align="bottom_right")
        kept = []
        for n, (block, before) in enumerate(zip(self.blocks, memories, strict=True)):
            kept.append(_last_positions(before, x, memory))
            biases = (each[n % len(each)] for each in (self.content_bias, self.position_bias))
            x = self.blocks.run(block, x, before, encodings, *biases, mask=mask)
        x = self.dropout(self.last_norm(x))
        logits = nn.functional.linear(x, self.embedding.weight, self.logits_bias)
        return logits, tuple(kept)

    def _encodings(self, length: int, x: Tensor) -> Tensor:
        """Encodings of the distances 0 to length - 1: (length, width), in x's dtype."""
        config = self.config
        return distance_sinusoids(length, config.width, clamp=config.clamp, device=x.device).to(x)

    def _check_memories(self, memories: Memories, batch: int) -> None:
        layers, width = self.config.layers, self.config.width
        shapes = [tuple(each.shape) for each in memories]
        expected = [(batch, shapes[0][1], width)] * layers if shapes and len(shapes[0]) == 3 else []
        if shapes != expected or not expected:
            raise ValueError(
                f"memories must be {layers} tensors (layers) of one shape "
                f"({batch}, length, {width}), got shapes {shapes}"
            )


def _last_positions(before: Tensor, x: Tensor, count: int) -> Tensor:
    """The last `count` positions of (before, x), detached, in storage of their own."""
    taken = min(count, x.shape[1])
    from_before = min(count - taken, before.shape[1])
    parts = (before[:, before.shape[1] - from_before :], x[:, x.shape[1] - taken :])
    return torch.cat([part.detach() for part in parts], dim=1)
