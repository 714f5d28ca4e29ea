"""Tasks with an answer for each example: classes, rows of a table, translations, recall."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from ...models.classifier import Classifier, ClassifierConfig
from ...models.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from ...models.linear_transformer import LinearTransformer, LinearTransformerConfig
from ...models.lookup import Lookup, LookupConfig
from ...models.reformer import Reformer, ReformerConfig
from ...models.translator import Translator, TranslatorConfig
from ...nn.options import check_probability
from ..config import is_text
from ..data import (
    BEGIN,
    END,
    PAD,
    Associations,
    Batch,
    Copies,
    Dataset,
    Fact,
    Facts,
    LabelledTexts,
    Pairs,
    RandomTexts,
    Tokens,
    as_facts,
    bytes_of,
    load_corpus,
    load_facts,
    load_pairs,
    load_reviews,
    load_snippets,
    review_text,
    spoken_pairs,
)
from ..task import (
    Batches,
    ClassificationTask,
    Extra,
    Losses,
    Task,
    TokenizedTask,
    accuracy,
    check_extra_keys,
    cross_entropy_sum,
    smoothed_cross_entropy,
)


@dataclass(frozen=True, kw_only=True)
class ClassifierTask(ClassificationTask, TokenizedTask):
    """A transformer text classifier.

    The number of classes is taken from the data.
    """

    kind = "classifier"
    unit = "tokens"
    text, label, target = "tokens", "labels", "class"
    data_help = (
        "a folder of film reviews laid out as aclImdb (default: source snippets, each labelled by "
        "the part of Python's standard library it comes from)"
    )
    fixed = frozenset({"classes"})
    extra_names = ("tokens", "classes")
    model_type = Classifier
    model: ClassifierConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> LabelledTexts:
        context = self.model.context
        if source is None:
            tokens = self.tokens_for(lambda: bytes_of(load_corpus().train), extra)
            return load_snippets(context, tokens=tokens)
        tokens = self.tokens_for(lambda: review_text(source), extra)
        return load_reviews(source, context, tokens=tokens)

    def fitted(self, data: Dataset) -> ClassifierTask:
        assert isinstance(data, LabelledTexts)
        return replace(self, model=replace(self.model, classes=len(data.classes)))

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, LabelledTexts)
        return super().extra(data) | {"classes": list(data.classes)}

    def check_extra(self, extra: Extra) -> None:
        super().check_extra(extra)
        classes = extra["classes"]
        if type(classes) is not list or not all(map(is_text, classes)):
            raise ValueError("extra.classes must be a list of names")
        if len(classes) != self.model.classes:
            raise ValueError(
                f"extra.classes must have {self.model.classes} names, got {len(classes)}"
            )


@dataclass(frozen=True, kw_only=True)
class LookupTask(ClassificationTask):
    """A learned lookup table: finds the fact that answers a question.

    Training uses soft attention over the rows; the score is the accuracy of hard attention.
    """

    kind = "lookup"
    unit = "words"
    text, label, target = "words", "rows", "row"
    data_help = (
        "a file with one fact per line: key, tab, value (default: the modules of Python's standard "
        "library and their descriptions)"
    )
    fixed = frozenset({"vocabulary", "rows"})
    model_type = Lookup
    model: LookupConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> Facts:
        return load_facts(source)

    def fitted(self, data: Dataset) -> LookupTask:
        assert isinstance(data, Facts)
        sizes = {"vocabulary": len(data.vocabulary), "rows": len(data.facts)}
        return replace(self, model=replace(self.model, **sizes))

    def extra(self, data: Dataset) -> Extra:
        assert isinstance(data, Facts)
        return {"facts": [[fact.key, fact.value] for fact in data.facts]}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "facts")
        facts = extra["facts"]
        if type(facts) is not list or not all(map(_is_pair, facts)):
            raise ValueError("extra.facts must be a list of keys and values")
        found = facts_from_extra(extra)
        sizes = (len(found.vocabulary), len(found.facts))
        if sizes != (self.model.vocabulary, self.model.rows):
            raise ValueError(
                f"extra.facts must have {self.model.vocabulary} words and {self.model.rows} facts, "
                f"got {sizes[0]} and {sizes[1]}"
            )

    def predicted(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, Lookup)
        return model.answer(batch["words"], batch["lengths"])


def facts_from_extra(extra: Extra) -> Facts:
    """The facts stored in the extra data of a checkpoint."""
    return as_facts([Fact(key, value) for key, value in extra["facts"]], "the checkpoint")


def _is_pair(value: object) -> bool:
    return type(value) is list and len(value) == 2 and all(map(is_text, value))


@dataclass(frozen=True, kw_only=True)
class TranslatorTask(TokenizedTask):
    """An encoder-decoder transformer for translation.

    The held-out loss is smoothed too. The score is the share of exactly correct translations.
    """

    kind = "translator"
    unit = "tokens"
    score_name = "exact"
    special = True
    data_help = (
        "a folder laid out as Multi30k, with train.de, train.en, val.de and val.en (default: "
        "numbers and dates, from words to figures and back)"
    )
    fixed = frozenset({"source_vocabulary", "target_vocabulary", "shared"})
    model_type = Translator
    model: TranslatorConfig
    smoothing: float = 0.1
    """Label smoothing: probability mass given to all other tokens"""

    def __post_init__(self) -> None:
        check_probability("smoothing", self.smoothing)

    @property
    def vocabulary(self) -> int:
        return min(self.model.source_vocabulary, self.model.target_vocabulary)

    def data(self, source: Path | None = None, extra: Extra | None = None) -> Pairs:
        if source is None:
            return spoken_pairs()
        tokens = None if extra is None else Tokens.from_json(extra["tokens"])
        longest = self.model.context - 2
        return load_pairs(source, vocabulary=self.vocabulary, tokens=tokens, longest=longest)

    def tokens(self, batch: Batch) -> int:
        return int(batch["source_lengths"].sum() + batch["target_lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"next token": int((batch["target_lengths"] - 1).sum())}

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        target = batch["target"]
        logits = model(batch["source"], target[:, :-1], batch["source_lengths"])
        loss, _ = smoothed_cross_entropy(
            logits, target[:, 1:].contiguous(), smoothing=self.smoothing, pad=PAD
        )
        return {"next token": loss}

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
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


class RandomTextTask(Task):
    """Base of the tasks that predict symbols in the second half of a random text.

    The model is a language model with `context` and `vocabulary` in its config. The score is the
    share of symbols whose prediction is right.
    """

    unit = "symbols"
    score_name = "accuracy"
    data_help = "none: texts are drawn at random"
    texts: ClassVar[type[RandomTexts]]
    target: ClassVar[str]
    """Name of the loss"""
    every: ClassVar[int]
    """Distance from one predicted symbol to the next; the first is the second of its half"""

    def data(self, source: Path | None = None, extra: Extra | None = None) -> RandomTexts:
        if source is not None:
            raise ValueError(f"this task draws its data at random and reads none, got {source}")
        return self.texts(self.model.context, self.model.vocabulary)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {self.target: self._asked(batch).numel()}

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        return {self.target: cross_entropy_sum(self._logits(model, batch), self._asked(batch))}

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
        return accuracy(
            (self._logits(model, batch).argmax(dim=-1), self._asked(batch)) for batch in batches
        )

    def _asked(self, batch: Batch) -> Tensor:
        """The symbols to predict: (B, symbols)."""
        tokens = batch["tokens"]
        return tokens[:, tokens.shape[1] // 2 + 1 :: self.every]

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits of the symbols to predict: (B, symbols, vocabulary)."""
        tokens = batch["tokens"]
        logits: Tensor = model(tokens[:, :-1])[:, tokens.shape[1] // 2 :: self.every]
        return logits


class CopyTask(RandomTextTask):
    """Base of the tasks that predict the second copy of a random word, symbol by symbol."""

    texts = Copies
    target = "copied symbol"
    every = 1


class RecallTask(RandomTextTask):
    """Base of the tasks that predict the value of each key that was told before."""

    texts = Associations
    target = "recalled value"
    every = 2


@dataclass(frozen=True, kw_only=True)
class ReformerCopyTask(CopyTask):
    """A Reformer that copies a word of random symbols.

    A test of whether hashing finds the one key that matters.
    """

    kind = "reformer-copy"
    model_type = Reformer
    model: ReformerConfig


@dataclass(frozen=True, kw_only=True)
class LinearCopyTask(CopyTask):
    """A Linear Transformer that copies a word of random symbols.

    A test of whether a sum over all keys separates them.
    """

    kind = "linear-copy"
    model_type = LinearTransformer
    model: LinearTransformerConfig


@dataclass(frozen=True, kw_only=True)
class LinearRecallTask(RecallTask):
    """A Linear Transformer that recalls the values of keys.

    A test of whether a sum of values by key separates them.
    """

    kind = "linear-recall"
    model_type = LinearTransformer
    model: LinearTransformerConfig


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetRecallTask(RecallTask):
    """A Gated DeltaNet that recalls the values of keys.

    A test of whether a state that corrects itself separates them.
    """

    kind = "gated-deltanet-recall"
    model_type = GatedDeltaNet
    model: GatedDeltaNetConfig
