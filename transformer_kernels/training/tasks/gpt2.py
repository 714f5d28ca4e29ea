"""Language modelling on byte-pair tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...models.gpt2 import GPT2, SIZES, GPT2Config
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from ..data import Batch, Dataset, Tokens, TokenWindows, bytes_of, load_corpus, train_tokens
from ..task import Extra, Task, check_extra_keys, tokens_of
from .generator import next_token_loss


@dataclass(frozen=True, kw_only=True)
class GPT2Task(Task):
    """Next-token prediction on any text, by default the standard library's sources.

    The tokenizer is trained on the training part of the text, up to the model's vocabulary.
    """

    kind = "gpt2"
    scales_out = True
    unit = "tokens"
    score_name = "bits/byte"
    config_type = GPT2Config

    model: GPT2Config

    def data(self, source: Path | None = None, extra: Extra | None = None) -> TokenWindows:
        corpus = load_corpus(source)
        if extra is None:
            tokens = train_tokens(bytes_of(corpus.train), self.model.vocabulary)
        else:
            tokens = Tokens.from_json(extra["tokens"])
        return TokenWindows(corpus, tokens, self.model.context)

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, TokenWindows)
        return {"tokens": data.tokens.to_json()}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "tokens")
        tokens_of(extra, vocabulary=self.model.vocabulary)

    def build(self, attn_implementation: AttnImplementation) -> GPT2:
        return GPT2(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next token": self.tokens(batch)}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"next token": next_token_loss(model, batch["tokens"])}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        assert isinstance(data, TokenWindows)
        return loss / math.log(2) / data.bytes_per_token


PRESETS = {
    "demo": TrainConfig(
        task=GPT2Task(
            model=GPT2Config(
                vocabulary=2048, context=128, layers=4, heads=4, width=128, dropout=0.0
            )
        ),
        steps=1000,
        batch=8,
        schedule=Schedule(peak=1e-3, warmup=100),
    ),
    **{
        name: TrainConfig(
            task=GPT2Task(model=SIZES[name]),
            steps=600_000,
            batch=480,
            accumulate=40,
            schedule=Schedule(peak=6e-4, warmup=2000),
            betas=(0.9, 0.95),
            eval_every=1000,
        )
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
}
"""Presets of GPT-2. The published sizes use the batch size, steps and learning rate of nanoGPT's
reproduction of GPT-2 (config/train_gpt2): half a million tokens per step."""
