"""GPT-2: a decoder-only language model with 124 million to 1.6 billion parameters.

Source: Language Models are Unsupervised Multitask Learners (Radford et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..masks.mask import Mask
from ..nn.attention import head_size
from ..nn.blocks import Stack, TransformerBlock
from ..nn.cache import KVCache
from ..nn.initial import normal_weights, smaller_branch_ends
from ..nn.options import AttnImplementation, check_choice, check_positive, check_probability
from ..nn.positions import LearnedPositions
from .published import Layout, PublishedWeights, open_weights, with_weights


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Hyperparameters of a `GPT2`; defaults are those of the paper."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 50257
    context: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_positive("layers", self.layers)
        check_positive("vocabulary", self.vocabulary)
        check_positive("context", self.context)
        head_size(self.width, self.heads, "narrow")
        check_probability("dropout", self.dropout)


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

    `attn_implementation` ("eager", "fused" or "sdpa") does not affect the result beyond rounding:
    weights trained with one implementation work with the others.
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
                config.width,
                config.heads,
                norm="pre",
                activation="gelu_tanh",
                bias=True,
                dropout=config.dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )
        self.last_norm = nn.LayerNorm(config.width)
        normal_weights(self)
        smaller_branch_ends(self, layers=config.layers)
        nn.init.normal_(self.positions.table, std=0.01)

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
            config = _published_config(weights, heads, dropout)
            state = _published_state(weights, config)
            weights.check_all_used()
        return with_weights(lambda: cls(config, attn_implementation=attn_implementation), state)

    @property
    def context(self) -> int:
        return self.config.context

    def new_cache(self, batch: int) -> KVCache:
        """Returns an empty cache for `batch` texts, with the capacity of the context."""
        config, weight = self.config, self.embedding.weight
        return KVCache(
            layers=config.layers, batch=batch, heads=config.heads, capacity=config.context,
            head_size=config.width // config.heads, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

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


_LAYOUT = Layout(prefix="transformer.", ignored=r"h\.\d+\.attn\.(bias|masked_bias)")


def _published_config(weights: PublishedWeights, heads: int | None, dropout: float) -> GPT2Config:
    vocabulary, width = weights.matrix("wte.weight")
    context, _ = weights.matrix("wpe.weight")
    return GPT2Config(
        layers=weights.layers("h."),
        heads=weights.heads(width, heads),
        width=width,
        vocabulary=vocabulary,
        context=context,
        dropout=dropout,
    )


def _published_state(weights: PublishedWeights, config: GPT2Config) -> dict[str, Tensor]:
    width = config.width
    state = {
        "embedding.weight": weights.load("wte.weight", (config.vocabulary, width)),
        "positions.table": weights.load("wpe.weight", (config.context, width)),
    } | weights.norm("ln_f", "last_norm", width)
    weights.check_tied("lm_head.weight", state["embedding.weight"])
    for n in range(config.layers):
        state |= _published_block(weights, f"h.{n}.", f"blocks.{n}.", width)
    return state


def _published_block(
    weights: PublishedWeights, hf_prefix: str, prefix: str, width: int
) -> dict[str, Tensor]:
    """Parameters of one block.

    In the file, linear weights are (inputs, outputs), and queries, keys and values are one layer.
    """
    state = weights.norm(hf_prefix + "ln_1", prefix + "attention_norm", width)
    state |= weights.norm(hf_prefix + "ln_2", prefix + "feed_forward_norm", width)
    for name, layers, inputs, outputs in (
        ("attn.c_attn", ("attention.queries", "attention.keys", "attention.values"), width, width),
        ("attn.c_proj", ("attention.out_proj",), width, width),
        ("mlp.c_fc", ("feed_forward.up_proj",), width, 4 * width),
        ("mlp.c_proj", ("feed_forward.down_proj",), 4 * width, width),
    ):
        together = len(layers) * outputs
        weight = weights.load(f"{hf_prefix}{name}.weight", (inputs, together)).split(outputs, dim=1)
        bias = weights.load(f"{hf_prefix}{name}.bias", (together,)).split(outputs)
        for layer, layer_weight, layer_bias in zip(layers, weight, bias, strict=True):
            state[f"{prefix}{layer}.weight"] = layer_weight.t().contiguous()
            state[f"{prefix}{layer}.bias"] = layer_bias.clone()
    return state
