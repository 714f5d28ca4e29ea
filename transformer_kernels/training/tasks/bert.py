"""BERT pre-training: masked tokens and next-sentence prediction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...models.bert import SIZES, BertConfig, BertForPreTraining
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig
from ..data import (
    IGNORE_INDEX,
    Batch,
    Dataset,
    MaskedSentences,
    Tokens,
    bytes_of,
    load_corpus,
    train_tokens,
)
from ..losses import cross_entropy_sum
from ..task import Extra, Task, check_extra_keys, tokens_of


@dataclass(frozen=True, kw_only=True)
class BertTask(Task):
    """BERT pre-training on any text, by default the standard library's sources.

    The tokenizer is trained on the training part of the text.
    """

    kind = "bert"
    unit = "tokens"
    score_name = "masked-token accuracy"
    config_type = BertConfig

    model: BertConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> MaskedSentences:
        corpus = load_corpus(source)
        if extra is None:
            tokens = train_tokens(bytes_of(corpus.train), self.model.vocabulary, special=True)
        else:
            tokens = Tokens.from_json(extra["tokens"])
        return MaskedSentences(corpus, tokens, self.model.context)

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, MaskedSentences)
        return {"tokens": data.tokens.to_json()}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "tokens")
        tokens_of(extra, vocabulary=self.model.vocabulary, special=True)

    def build(self, attn_implementation: AttnImplementation) -> BertForPreTraining:
        return BertForPreTraining(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {
            "masked tokens": int((batch["labels"] != IGNORE_INDEX).sum()),
            "next sentence": len(batch["is_next"]),
        }

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = model(batch["tokens"], segments=batch["segments"], lengths=batch["lengths"])
        masked = cross_entropy_sum(logits.tokens, batch["labels"], ignored=IGNORE_INDEX)
        next_sentence = cross_entropy_sum(logits.next_sentence, 1 - batch["is_next"])
        return {"masked tokens": masked, "next sentence": next_sentence}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        correct = count = 0
        for batch in batches:
            logits = model(batch["tokens"], segments=batch["segments"], lengths=batch["lengths"])
            selected = batch["labels"] != IGNORE_INDEX
            correct += int((logits.tokens.argmax(dim=-1) == batch["labels"])[selected].sum())
            count += int(selected.sum())
        return correct / count


PRESETS = {
    "demo": TrainConfig(
        task=BertTask(
            model=BertConfig(vocabulary=2048, context=128, layers=4, heads=4, width=128, hidden=512)
        ),
        steps=600,
        batch=16,
        schedule=Schedule(peak=1e-3, warmup=60),
        betas=(0.9, 0.98),
    ),
    **{
        name: TrainConfig(
            task=BertTask(model=SIZES[name]),
            steps=1_000_000,
            batch=256,
            accumulate=16,
            schedule=Schedule(peak=1e-4, warmup=10_000, final_share=0.0),
            betas=(0.9, 0.999),
            weight_decay=0.01,
            eval_every=1000,
        )
        for name in ("bert-base", "bert-large")
    },
}
"""Presets of BERT. The published sizes use the batch size, steps and peak rate of BERT's
pre-training, but with cosine decay instead of linear decay."""
