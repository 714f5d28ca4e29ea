"""Parts that tasks share: a tokenizer in the extra data, classes and accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from ..data import Batch, Dataset
from ..task import Extra, Task, check_extra_keys, tokens_of


class TokenizedTask(Task):
    """Base of the tasks whose datasets have a tokenizer `tokens`, which checkpoints store."""

    special: ClassVar[bool] = False
    """True if the tokenizer has special tokens"""

    @property
    def vocabulary(self) -> int:
        """Largest number of tokens that the model can have."""
        size: int = self.model.vocabulary
        return size

    def extra(self, data: Dataset) -> Extra:
        with_tokens: Any = data
        return {"tokens": with_tokens.tokens.to_json()}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, "tokens")
        tokens_of(extra, vocabulary=self.vocabulary, special=self.special)


class ClassificationTask(Task):
    """Base of the tasks that choose one of several classes for each text."""

    score_name = "accuracy"
    text: ClassVar[str]
    label: ClassVar[str]
    """Names in a batch of the text and of the index of its class"""
    target: ClassVar[str]
    """Name of the loss"""

    def tokens(self, batch: Batch) -> int:
        return int(batch["lengths"].sum())

    def counts(self, batch: Batch) -> dict[str, int]:
        return {self.target: len(batch[self.label])}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        log_p = model(batch[self.text], batch["lengths"])
        return {self.target: nn.functional.nll_loss(log_p, batch[self.label], reduction="sum")}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        return accuracy((self.predicted(model, batch), batch[self.label]) for batch in batches)

    def predicted(self, model: nn.Module, batch: Batch) -> Tensor:
        """Index of the most likely class of each text: (B,) int64."""
        log_p: Tensor = model(batch[self.text], batch["lengths"])
        return log_p.argmax(dim=-1)


def accuracy(predictions: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of elements that are equal in pairs of predicted and expected values."""
    correct = count = 0
    for predicted, expected in predictions:
        correct += int((predicted == expected).sum())
        count += expected.numel()
    return correct / count
