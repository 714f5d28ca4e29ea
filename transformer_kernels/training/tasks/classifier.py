"""Text classification."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from ...models.classifier import SIZES, Classifier, ClassifierConfig
from ...nn.options import AttnImplementation
from ..config import Schedule, TrainConfig, is_text
from ..data import (
    Batch,
    Dataset,
    LabelledTexts,
    Tokens,
    bytes_of,
    load_corpus,
    load_reviews,
    load_snippets,
    review_text,
    train_tokens,
)
from ..task import Extra, Task, check_extra_keys, tokens_of


@dataclass(frozen=True, kw_only=True)
class ClassifierTask(Task):
    """Classification of film reviews (a folder laid out as aclImdb), or by default of snippets of
    the standard library by their origin. The number of classes is taken from the data."""

    kind = "classifier"
    unit = "tokens"
    score_name = "accuracy"
    config_type = ClassifierConfig

    model: ClassifierConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> LabelledTexts:
        tokens = self._tokens(source) if extra is None else Tokens.from_json(extra["tokens"])
        if source is None:
            return load_snippets(self.model.context, tokens=tokens)
        return load_reviews(source, self.model.context, tokens=tokens)

    def _tokens(self, source: Path | None) -> Tokens:
        text = bytes_of(load_corpus().train) if source is None else review_text(source)
        return train_tokens(text, self.model.vocabulary)

    def fitted(self, data: Dataset) -> ClassifierTask:
        assert isinstance(data, LabelledTexts)
        return replace(self, model=replace(self.model, classes=len(data.classes)))

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, LabelledTexts)
        return {"tokens": data.tokens.to_json(), "classes": list(data.classes)}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "tokens", "classes")
        tokens_of(extra, vocabulary=self.model.vocabulary)
        classes = extra["classes"]
        if type(classes) is not list or not all(map(is_text, classes)):
            raise ValueError("extra.classes must be a list of names")
        if len(classes) != self.model.classes:
            raise ValueError(
                f"extra.classes must have {self.model.classes} names, got {len(classes)}"
            )

    def build(self, attn_implementation: AttnImplementation) -> Classifier:
        return Classifier(self.model, attn_implementation=attn_implementation)

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"class": len(batch["labels"])}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        log_p = model(batch["tokens"], batch["lengths"])
        return {"class": nn.functional.nll_loss(log_p, batch["labels"], reduction="sum")}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        correct = count = 0
        for batch in batches:
            predicted = model(batch["tokens"], batch["lengths"]).argmax(dim=-1)
            correct += int((predicted == batch["labels"]).sum())
            count += len(predicted)
        return correct / count


PRESETS = {
    "demo": TrainConfig(
        task=ClassifierTask(model=SIZES["demo"]),
        steps=1500,
        batch=16,
        schedule=Schedule(peak=1e-3, warmup=150),
        eval_every=250,
    ),
    "seed": TrainConfig(
        task=ClassifierTask(model=SIZES["seed"]),
        steps=25_000,
        batch=4,
        schedule=Schedule(peak=1e-4, warmup=2500, final_share=1.0),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eval_every=2500,
        eval_batches=250,
    ),
}
"""Presets of the classifier. seed has the batch size and learning rate of the experiment linked in
the model's source."""
