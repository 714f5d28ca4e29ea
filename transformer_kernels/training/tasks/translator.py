"""Translation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ...models.translator import SIZES, Translator, TranslatorConfig
from ...nn.options import AttnImplementation, check_probability
from ..config import Schedule, TrainConfig
from ..data import BEGIN, END, PAD, Batch, Dataset, Pairs, Tokens, load_pairs, spoken_pairs
from ..losses import smoothed_cross_entropy
from ..task import Extra, Task, check_extra_keys, tokens_of


@dataclass(frozen=True, kw_only=True)
class TranslatorTask(Task):
    """Translation from a folder laid out as Multi30k, or by default of numbers and dates.

    The held-out loss is smoothed too. The score is the share of exactly correct translations.
    """

    kind = "translator"
    unit = "tokens"
    score_name = "exact"
    config_type = TranslatorConfig

    model: TranslatorConfig
    smoothing: float = 0.1
    """Label smoothing: probability mass given to all other tokens"""

    def __post_init__(self) -> None:
        check_probability("smoothing", self.smoothing)

    def data(self, source: Path | None = None, extra: Extra | None = None) -> Pairs:
        if source is None:
            return spoken_pairs()
        tokens = None if extra is None else Tokens.from_json(extra["tokens"])
        vocabulary, longest = self.model.target_vocabulary, self.model.context - 2
        return load_pairs(source, vocabulary=vocabulary, tokens=tokens, longest=longest)

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, Pairs)
        return {"tokens": data.tokens.to_json()}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "tokens")
        vocabulary = min(self.model.source_vocabulary, self.model.target_vocabulary)
        tokens_of(extra, vocabulary=vocabulary, special=True)

    def build(self, attn_implementation: AttnImplementation) -> Translator:
        return Translator(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return int(batch["source_lengths"].sum() + batch["target_lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next token": int((batch["target_lengths"] - 1).sum())}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        target = batch["target"]
        logits = model(batch["source"], target[:, :-1], batch["source_lengths"])
        loss, _ = smoothed_cross_entropy(
            logits, target[:, 1:].contiguous(), smoothing=self.smoothing, pad=PAD
        )
        return {"next token": loss}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        assert isinstance(model, Translator)
        correct = count = 0
        for batch in batches:
            max_tokens = min(batch["target"].shape[1], model.context)
            translations = model.translate(
                batch["source"], batch["source_lengths"], begin=BEGIN, end=END, most=max_tokens
            )
            targets = zip(batch["target"].tolist(), batch["target_lengths"].tolist(), strict=True)
            for translation, (target, length) in zip(translations, targets, strict=True):
                correct += translation == target[1 : length - 1]
                count += 1
        return correct / count


PRESETS = {
    "demo": TrainConfig(
        task=TranslatorTask(model=SIZES["demo"]),
        steps=1600,
        batch=32,
        schedule=Schedule(peak=1e-3, warmup=200),
        betas=(0.9, 0.98),
        weight_decay=0.0,
        eval_every=400,
        eval_batches=8,
    ),
    "base": TrainConfig(
        task=TranslatorTask(model=SIZES["base"]),
        steps=100_000,
        batch=512,
        accumulate=8,
        schedule=Schedule(
            decay="inverse_sqrt", peak=(512 * 4000) ** -0.5, warmup=4000, final_share=0.0
        ),
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.0,
        eval_every=1000,
    ),
}
"""Presets of the translator. base is the base model of Attention Is All You Need, section 5: about
25,000 tokens per step on each side."""
