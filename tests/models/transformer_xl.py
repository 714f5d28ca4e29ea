"""Transformer-XL by direct indices, as a reference for the model; plain torch, without a skew."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from transformer_kernels.models import TransformerXL, TransformerXLConfig
from transformer_kernels.nn import AttnImplementation, RelativeAttention, RelativeBlock

TINY = TransformerXLConfig(
    layers=2, heads=2, width=10, head_size=7, hidden=13, vocabulary=17,
    context=5, memory=5, dropout=0.0,
)  # fmt: skip


def model(
    config: TransformerXLConfig = TINY, attn_implementation: AttnImplementation = "fused"
) -> TransformerXL:
    """A model in float64 with large random weights, so that a wrong position shows."""
    transformer = TransformerXL(config, attn_implementation=attn_implementation).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return transformer


def tokens(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.vocabulary, (batch, length), generator=generator)


def by_segments(transformer: TransformerXL, text: Tensor, length: int) -> Tensor:
    """Logits of a text (B, T) that is read in segments."""
    memories, results = None, []
    for segment in text.split(length, dim=1):
        logits, memories = transformer(segment, memories)
        results.append(logits)
    return torch.cat(results, dim=1)


def plain_logits(transformer: TransformerXL, text: Tensor, length: int) -> Tensor:
    """`by_segments` without dropout, from the weights alone."""
    config = transformer.config
    memories = [torch.empty(len(text), 0, config.width).double()] * config.layers
    results = []
    for segment in text.split(length, dim=1):
        x = transformer.embedding.weight[segment] * math.sqrt(config.width)
        for n, block in enumerate(transformer.blocks):
            assert isinstance(block, RelativeBlock)
            memory = memories[n]
            source = torch.cat([memory, x], dim=1)
            memories[n] = source[:, max(source.shape[1] - config.memory, 0) :].detach()
            x = _block(transformer, block, n, x, source)
        x = transformer.last_norm(x)
        results.append(x @ transformer.embedding.weight.T + transformer.logits_bias)
    return torch.cat(results, dim=1)


def _block(
    transformer: TransformerXL, block: RelativeBlock, n: int, x: Tensor, source: Tensor
) -> Tensor:
    def feed_forward(y: Tensor) -> Tensor:
        layers = block.feed_forward
        return layers.down_proj(layers.up_proj(y).clamp(min=0))  # type: ignore[no-any-return]

    if transformer.config.norm == "pre":
        normal, source = block.attention_norm(x), block.attention_norm(source)
        x = x + _attention(transformer, block.attention, n, normal, source)
        return x + feed_forward(block.feed_forward_norm(x))
    y: Tensor = block.attention_norm(x + _attention(transformer, block.attention, n, x, source))
    z: Tensor = block.feed_forward_norm(y + feed_forward(y))
    return z


def _attention(
    transformer: TransformerXL, attention: RelativeAttention, n: int, x: Tensor, source: Tensor
) -> Tensor:
    config = transformer.config
    n = 0 if config.tied_biases else n
    q, k, v = attention.queries(x), attention.keys(source), attention.values(source)
    results = []
    for h in range(config.heads):
        head = slice(h * attention.head_size, (h + 1) * attention.head_size)
        scores = torch.stack(
            [
                _row(
                    q[:, i, head] + transformer.content_bias[n, h],
                    q[:, i, head] + transformer.position_bias[n, h],
                    k[..., head],
                    attention.distance_keys.weight[head],
                    config,
                    source.shape[1] - x.shape[1] + i,
                )
                for i in range(x.shape[1])
            ],
            dim=1,
        )
        weights = (scores / math.sqrt(attention.head_size)).softmax(dim=-1)
        results.append(weights @ v[..., head])
    y: Tensor = attention.out_proj(torch.cat(results, dim=-1))
    return y


def _row(
    with_u: Tensor, with_v: Tensor, k: Tensor, weight: Tensor, config: TransformerXLConfig, at: int
) -> Tensor:
    """Unscaled scores (B, N) of the query at position `at` of the keys."""
    scores = []
    for j in range(k.shape[1]):
        e = at - j
        if e < 0 or (config.same_length and e >= config.memory):
            scores.append(torch.full_like(with_u[:, 0], -torch.inf))
            continue
        r = weight @ encoding(e if config.clamp is None else min(e, config.clamp), config.width)
        scores.append((with_u * k[:, j]).sum(dim=-1) + with_v @ r)
    return torch.stack(scores, dim=1)


def encoding(e: int, width: int) -> Tensor:
    """Encoding of the distance e: all sines, then all cosines."""
    angles = [e / 10000 ** (2 * i / width) for i in range((width + 1) // 2)]
    values = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return torch.tensor(values[:width], dtype=torch.float64)


def loss_gradients(transformer: nn.Module, logits: Tensor) -> list[Tensor]:
    """Gradients of a fixed random combination of the logits in every parameter."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    return list(torch.autograd.grad((logits * weights).sum(), list(transformer.parameters())))


def changed(**changes: object) -> TransformerXLConfig:
    """TINY with other options."""
    return replace(TINY, **changes)  # type: ignore[arg-type]
