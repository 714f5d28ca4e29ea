"""T5 in plain torch on the tensors of a published file, as an oracle for `models.T5`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.buckets import bucket_by_integers
from transformer_kernels.models import T5Config

Tensors = dict[str, Tensor]
"""Tensors by their names in a file of HuggingFace."""


def random_tensors(config: T5Config) -> Tensors:
    """Random tensors of a file, in float64, large enough that a swapped one shows."""
    width, hidden, inner = config.width, config.hidden, config.heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (config.vocabulary, width)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary, width)
    for stack, layers in (("encoder", config.layers), ("decoder", config.decoder_layers)):
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
        kinds = ["SelfAttention", "EncDecAttention"][: 1 if stack == "encoder" else 2]
        for n in range(layers):
            block = f"{stack}.block.{n}.layer"
            for place, kind in enumerate(kinds):
                for name in "qkv":
                    shapes[f"{block}.{place}.{kind}.{name}.weight"] = (inner, width)
                shapes[f"{block}.{place}.{kind}.o.weight"] = (width, inner)
            feed_forward = f"{block}.{len(kinds)}.DenseReluDense"
            for name in ["wi"] if config.activation == "relu" else ["wi_0", "wi_1"]:
                shapes[f"{feed_forward}.{name}.weight"] = (hidden, width)
            shapes[f"{feed_forward}.wo.weight"] = (width, hidden)
            for place in range(len(kinds) + 1):
                shapes[f"{block}.{place}.layer_norm.weight"] = (width,)
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes[table] = (config.buckets, config.heads)
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


class T5ByFormula:
    """Logits of one source and one target, without padding."""

    def __init__(self, tensors: Tensors, config: T5Config) -> None:
        self.tensors = tensors
        self.config = config

    def logits(self, source: Tensor, target_in: Tensor) -> Tensor:
        """source (S,), target_in (T,) -> (T, vocabulary)."""
        memory = self._stack("encoder", source, None)
        y = self._stack("decoder", target_in, memory)
        if self.config.tied_embeddings:
            y = y / self.config.width**0.5
        name = "shared.weight" if self.config.tied_embeddings else "lm_head.weight"
        return y @ self.tensors[name].T

    def _stack(self, stack: str, tokens: Tensor, memory: Tensor | None) -> Tensor:
        x = self.tensors["shared.weight"][tokens]
        bias = self._bias(stack, len(tokens))
        layers = self.config.layers if memory is None else self.config.decoder_layers
        for n in range(layers):
            block = f"{stack}.block.{n}.layer"
            y = self._norm(f"{block}.0.layer_norm", x)
            x = x + self._attention(f"{block}.0.SelfAttention", y, y, bias)
            if memory is not None:
                y = self._norm(f"{block}.1.layer_norm", x)
                x = x + self._attention(f"{block}.1.EncDecAttention", y, memory, None)
            last = f"{block}.{1 if memory is None else 2}"
            x = x + self._feed_forward(
                f"{last}.DenseReluDense", self._norm(f"{last}.layer_norm", x)
            )
        return self._norm(f"{stack}.final_layer_norm", x)

    def _bias(self, stack: str, T: int) -> Tensor:
        """(heads, T, T); -inf above the diagonal in the decoder."""
        table = self.tensors[
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ]
        encoder = stack == "encoder"
        rows = [
            [
                bucket_by_integers(
                    i - j, self.config.buckets, self.config.max_distance, bidirectional=encoder
                )
                for j in range(T)
            ]
            for i in range(T)
        ]
        bias = table[torch.tensor(rows)].permute(2, 0, 1)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        return bias if encoder else bias.masked_fill(future, float("-inf"))

    def _attention(self, name: str, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            (y @ self.tensors[f"{name}.{layer}.weight"].T)
            .unflatten(1, (self.config.heads, self.config.head_size))
            .transpose(0, 1)
            for layer, y in (("q", x), ("k", source), ("v", source))
        )
        s = q @ k.mT if bias is None else q @ k.mT + bias
        o = (s.softmax(dim=-1) @ v).transpose(0, 1).flatten(1)
        y: Tensor = o @ self.tensors[f"{name}.o.weight"].T
        return y

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        weights = {
            layer: self.tensors[f"{name}.{layer}.weight"].T
            for layer in ("wi", "wi_0", "wi_1", "wo")
            if f"{name}.{layer}.weight" in self.tensors
        }
        if "wi" in weights:
            return (x @ weights["wi"]).relu() @ weights["wo"]
        gate = nn.functional.gelu(x @ weights["wi_0"], approximate="tanh")
        return gate * (x @ weights["wi_1"]) @ weights["wo"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x / (mean_square + self.config.eps).sqrt() * self.tensors[f"{name}.weight"]
