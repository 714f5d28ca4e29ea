"""GPT-2: a decoder-only language model with 124 million to 1.6 billion parameters.

Source: Language Models are Unsupervised Multitask Learners (Radford et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import KVCache, size_of_heads
from ..nn.blocks import Stack, TransformerBlock, normal_weights, smaller_branch_ends
from ..nn.options import AttnImplementation, check_choice, check_fields
from ..nn.positions import LearnedPositions
from .published import Layout, PublishedWeights, names_of_layers, open_weights


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Hyperparameters of a `GPT2`; defaults are those of the paper."""

    layers: int
    """Number of transformer blocks"""
    heads: int
    """Number of attention heads"""
    width: int
    """Model width (embedding dimension)"""
    vocabulary: int = 50257
    """Number of tokens; byte pairs are merged up to this size"""
    context: int = 1024
    """Context length in tokens"""
    dropout: float = 0.1
    """Dropout probability in training"""

    def __post_init__(self) -> None:
        check_fields(self)
        size_of_heads(self.width, self.heads)


SIZES = {
    "gpt2": GPT2Config(layers=12, heads=12, width=768),
    "gpt2-medium": GPT2Config(layers=24, heads=16, width=1024),
    "gpt2-large": GPT2Config(layers=36, heads=20, width=1280),
    "gpt2-xl": GPT2Config(layers=48, heads=25, width=1600),
}
"""Published sizes by name."""


class GPT2(nn.Module):
    """GPT-2 language model: logits of the next token at every position of a text.

    The token embedding and the projection to logits share one weight. To generate text, see
    `models.generation.generate`.
    """

    def __init__(
        self, config: GPT2Config, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = LearnedPositions(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            TransformerBlock(
                config.width, config.heads,
                norm="pre", activation="gelu_tanh", bias=True, dropout=config.dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(config.width)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)
        nn.init.normal_(self.positions.table, std=0.01)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int) -> KVCache:
        """Returns an empty cache for `batch` texts, with the capacity of the context."""
        return self.blocks.new_cache(batch, self.context)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Computes logits of the next token at every position.

        Args:
            tokens: (B, T) int64, T up to the context.
            cache: key/value cache of the preceding tokens; `tokens` are appended to it.

        Returns:
            logits (B, T, vocabulary); row t depends on tokens 0 to t only.

        Raises:
            ValueError: the text is longer than the context or the cache's capacity.
        """
        start = 0 if cache is None else cache.extend(tokens.shape[1])
        x: Tensor = self.dropout(self.positions(self.embedding(tokens), start=start))
        x = self.blocks(x, mask=Mask.causal() if cache is None else None, cache=cache)
        return nn.functional.linear(self.last_norm(x), self.embedding.weight)

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        *,
        heads: int | None = None,
        dropout: float = 0.1,
        attn_implementation: AttnImplementation = "fused",
    ) -> GPT2:
        """Loads the model from a safetensors file of HuggingFace.

        The config follows from the shapes in the file, except for `heads` and `dropout`. Weights
        are converted to torch's default dtype, and the model is in evaluation mode.

        Args:
            path: the file, as published by HuggingFace (model.safetensors).
            heads: number of attention heads; width / 64 unless given.
            dropout: dropout probability of the model in training mode.
            attn_implementation: "eager", "fused" or "sdpa".

        Raises:
            ImportError: the package safetensors is not installed.
            OSError: the file cannot be read.
            ValueError: it is not a valid safetensors file, or a tensor is missing, unexpected or
                of the wrong shape; the message names the tensor.
        """
        check_choice("attn_implementation", attn_implementation, AttnImplementation)
        with open_weights(path, _LAYOUT) as weights:
            vocabulary, width = weights.matrix("wte.weight")
            context, _ = weights.matrix("wpe.weight")
            config = GPT2Config(
                layers=weights.layers("h."), heads=weights.heads(width, heads), width=width,
                vocabulary=vocabulary, context=context, dropout=dropout,
            )  # fmt: skip
            return weights.model(
                lambda: cls(config, attn_implementation=attn_implementation),
                _NAMES | names_of_layers(config.layers, _BLOCK_NAMES),
                given=_published_projections(weights, config),
                tied={"lm_head.weight": "embedding.weight"},
            )


_LAYOUT = Layout(prefix="transformer.", ignored=r"h\.\d+\.attn\.(bias|masked_bias)")
_NAMES = {"embedding": "wte", "positions.table": "wpe.weight", "last_norm": "ln_f"}
_BLOCK_NAMES = {
    "blocks.*.attention_norm": "h.*.ln_1",
    "blocks.*.feed_forward_norm": "h.*.ln_2",
}


def _published_projections(weights: PublishedWeights, config: GPT2Config) -> dict[str, Tensor]:
    """Linear layers of all blocks.

    In the file, linear weights are (inputs, outputs), and queries, keys and values are one layer.
    """
    width, state = config.width, {}
    for n in range(config.layers):
        for name, layers, inputs, outputs in (
            ("attn.c_attn", ("attention.queries", "attention.keys", "attention.values"), 1, 1),
            ("attn.c_proj", ("attention.out_proj",), 1, 1),
            ("mlp.c_fc", ("feed_forward.up_proj",), 1, 4),
            ("mlp.c_proj", ("feed_forward.down_proj",), 4, 1),
        ):
            together = len(layers) * outputs * width
            weight = weights.load(f"h.{n}.{name}.weight", (inputs * width, together))
            bias = weights.load(f"h.{n}.{name}.bias", (together,))
            for part, layer in enumerate(layers):
                own = slice(part * outputs * width, (part + 1) * outputs * width)
                state[f"blocks.{n}.{layer}.weight"] = weight[:, own].t().contiguous()
                state[f"blocks.{n}.{layer}.bias"] = bias[own].clone()
    return state
