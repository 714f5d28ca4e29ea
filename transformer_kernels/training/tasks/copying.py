"""Base of the tasks that copy a word: 0 w 0 w."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from ..data import Batch, Copies, Dataset
from ..losses import cross_entropy_sum
from ..task import Extra, Task


class CopyTask(Task):
    """Prediction of the second copy of a random word, symbol by symbol.

    The model is a language model with `context` and `vocabulary` in its config. The score is the
    share of symbols whose prediction is right.
    """

    unit = "symbols"
    score_name = "accuracy"

    def data(self, source: Path | None = None, extra: Extra | None = None) -> Copies:
        if source is not None:
            raise ValueError(f"this task draws its data at random and reads none, got {source}")
        return Copies(self.model.context, self.model.vocabulary)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"].numel()

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"copied symbol": _copy(batch).numel()}

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"copied symbol": cross_entropy_sum(_logits_of_copy(model, batch), _copy(batch))}

    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        correct = count = 0
        for batch in batches:
            predicted = _logits_of_copy(model, batch).argmax(dim=-1)
            correct += int((predicted == _copy(batch)).sum())
            count += predicted.numel()
        return correct / count


def _copy(batch: Batch) -> Tensor:
    """The second copy of each word: (B, context / 2 - 1)."""
    tokens = batch["tokens"]
    return tokens[:, tokens.shape[1] // 2 + 1 :]


def _logits_of_copy(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the second copy: (B, context / 2 - 1, vocabulary)."""
    tokens = batch["tokens"][:, :-1]
    logits: Tensor = model(tokens)[:, batch["tokens"].shape[1] // 2 :]
    return logits
