"""Language modelling: the next byte or token of a text, or its masked tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from ...dispatch.division import own_tokens
from ...models.bert import BertConfig, BertForPreTraining
from ...models.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from ...models.generator import VOCABULARY, GeneratorConfig, TextGenerator
from ...models.gpt2 import GPT2, GPT2Config
from ...models.linear_transformer import LinearTransformer, LinearTransformerConfig
from ...models.reformer import Reformer, ReformerConfig
from ...models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from ...models.transformer_xl import TransformerXL, TransformerXLConfig
from ..data import (
    IGNORE_INDEX,
    Batch,
    ByteLanes,
    ByteWindows,
    Dataset,
    MaskedSentences,
    TokenWindows,
    bytes_of,
    load_corpus,
)
from ..task import (
    Batches,
    Extra,
    Losses,
    RecurrentTask,
    Shapes,
    State,
    Task,
    TokenizedTask,
    accuracy,
    cross_entropy_sum,
)

_TEXT = "training text, any file (default: the sources of Python's standard library)"


class LanguageTask(Task):
    """Base of the tasks that predict the next element of windows of a text."""

    target: ClassVar[str]
    """Name of the loss"""
    data_help = _TEXT

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {self.target: self.tokens(batch)}

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Under a division of sequences, the sums of this rank's share of them."""
        tokens = batch["tokens"]
        inputs, targets = (own_tokens(x, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
        return {self.target: cross_entropy_sum(model(inputs), targets)}


class NextByteTask(LanguageTask):
    """Base of the tasks that predict the next byte; models have at least as many tokens."""

    unit = "bytes"
    score_name = "bits/byte"
    target = "next byte"
    fixed = frozenset({"vocabulary"})

    def __post_init__(self) -> None:
        vocabulary = getattr(self.model, "vocabulary", VOCABULARY)
        if vocabulary < VOCABULARY:
            raise ValueError(
                f"vocabulary must be at least {VOCABULARY}, the number of bytes, got {vocabulary}"
            )

    def data(self, source: Path | None = None, extra: Extra | None = None) -> ByteWindows:
        return ByteWindows(load_corpus(source), self.model.context)

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
        return loss / math.log(2)


@dataclass(frozen=True, kw_only=True)
class GeneratorTask(NextByteTask):
    """A byte-level transformer language model."""

    kind = "generator"
    scales_out = True
    model_type = TextGenerator
    model: GeneratorConfig


@dataclass(frozen=True, kw_only=True)
class SparseTransformerTask(NextByteTask):
    """Sparse Transformer, a byte-level language model with a long context."""

    kind = "sparse"
    model_type = SparseTransformer
    model: SparseTransformerConfig


@dataclass(frozen=True, kw_only=True)
class ReformerTask(NextByteTask):
    """Reformer, a byte-level language model with a long context."""

    kind = "reformer"
    model_type = Reformer
    model: ReformerConfig


@dataclass(frozen=True, kw_only=True)
class LinearTransformerTask(NextByteTask):
    """Linear Transformer, a byte-level language model that generates as a recurrence."""

    kind = "linear"
    model_type = LinearTransformer
    model: LinearTransformerConfig


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetTask(NextByteTask):
    """Gated DeltaNet, a byte-level language model of delta-rule and attention layers."""

    kind = "gated-deltanet"
    model_type = GatedDeltaNet
    model: GatedDeltaNetConfig


@dataclass(frozen=True, kw_only=True)
class TransformerXLTask(RecurrentTask, NextByteTask):
    """Transformer-XL, a byte-level language model with memories of earlier segments.

    Trains on the segments of a text in order, and carries the memories of each lane. Holds out the
    same bytes as `GeneratorTask`.
    """

    kind = "transformer-xl"
    model_type = TransformerXL
    model: TransformerXLConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> ByteLanes:
        return ByteLanes(load_corpus(source), self.model.context)

    def carry(self, model: nn.Module, batch: Batch, state: State) -> tuple[Losses, State]:
        tokens = batch["tokens"]
        logits, memories = model(tokens[:, :-1], state or None)
        return {self.target: cross_entropy_sum(logits, tokens[:, 1:])}, memories

    def state_shapes(self, lanes: int, segments: int) -> Shapes:
        length = min(self.model.memory, segments * self.model.context)
        return ((lanes, length, self.model.width),) * self.model.layers


@dataclass(frozen=True, kw_only=True)
class GPT2Task(TokenizedTask, LanguageTask):
    """GPT-2 from scratch, with a byte-pair tokenizer trained on the same text.

    The tokenizer is trained on the training part of the text, up to the model's vocabulary.
    """

    kind = "gpt2"
    scales_out = True
    unit = "tokens"
    score_name = "bits/byte"
    target = "next token"
    model_type = GPT2
    model: GPT2Config

    def data(self, source: Path | None = None, extra: Extra | None = None) -> TokenWindows:
        corpus = load_corpus(source)
        tokens = self.tokens_for(lambda: bytes_of(corpus.train), extra)
        return TokenWindows(corpus, tokens, self.model.context)

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
        assert isinstance(data, TokenWindows)
        return loss / math.log(2) / data.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class BertTask(TokenizedTask):
    """BERT, by masked-token and next-sentence prediction.

    The tokenizer is trained on the training part of the text.
    """

    kind = "bert"
    unit = "tokens"
    score_name = "masked-token accuracy"
    special = True
    data_help = _TEXT
    fixed = frozenset({"segments", "eps"})
    model_type = BertForPreTraining
    model: BertConfig

    def data(self, source: Path | None = None, extra: Extra | None = None) -> MaskedSentences:
        corpus = load_corpus(source)
        tokens = self.tokens_for(lambda: bytes_of(corpus.train), extra)
        return MaskedSentences(corpus, tokens, self.model.context)

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {
            "masked tokens": int((batch["labels"] != IGNORE_INDEX).sum()),
            "next sentence": len(batch["is_next"]),
        }

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        logits = model(batch["tokens"], segments=batch["segments"], lengths=batch["lengths"])
        masked = cross_entropy_sum(logits.tokens, batch["labels"], ignored=IGNORE_INDEX)
        next_sentence = cross_entropy_sum(logits.next_sentence, 1 - batch["is_next"])
        return {"masked tokens": masked, "next sentence": next_sentence}

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
        def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
            logits = model(batch["tokens"], segments=batch["segments"], lengths=batch["lengths"])
            selected = batch["labels"] != IGNORE_INDEX
            return logits.tokens.argmax(dim=-1)[selected], batch["labels"][selected]

        return accuracy(map(predictions, batches))
