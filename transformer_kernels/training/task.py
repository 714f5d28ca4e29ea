"""Base classes of training tasks: a model with its data, losses and score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..common.argument_checks import shown
from ..nn.options import AttnImplementation, check_probability
from .data import Batch, Dataset, Tokens, train_tokens

Extra = dict[str, Any]
"""Data that a model needs for inference, such as its vocabulary: plain values for checkpoints"""

State = tuple[Tensor, ...]
"""State that a model carries from batch to batch; dimension 0 is the batch dimension. No gradient
flows through it. The empty tuple starts anew."""

Losses = dict[str, Tensor]
"""Sums of losses in nats, by name"""

Batches = Iterable[Batch]

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a state"""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Config of a model and options of its training; subclasses are in `training/tasks/`."""

    kind: ClassVar[str]
    """Name without spaces, used by the command line and stored in checkpoints"""
    unit: ClassVar[str]
    """Unit of `tokens`, in the plural"""
    score_name: ClassVar[str]
    """Display name of `score`"""
    scales_out: ClassVar[bool] = False
    """True if sequences and parameters may be divided over processes: every loss is a sum over
    tokens, of this rank's alone under a division (`dispatch.division`), the score follows from the
    loss, and the model runs by its forward pass only."""

    model_type: ClassVar[Callable[..., nn.Module]]
    """Class of the model; takes its config and `attn_implementation`"""
    data_help: ClassVar[str]
    """Files that `data` reads, and what it uses without, for the command line"""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields of the model's config that the data or the task determines; not options"""

    model: Any
    """The model's config"""

    @abstractmethod
    def data(self, source: Path | None = None, extra: Extra | None = None) -> Dataset:
        """Loads the dataset.

        Args:
            source: file or folder of the user; None uses data that every Python installation has.
            extra: extra data of a checkpoint, to load the dataset as in its run.

        Raises:
            OSError: a file cannot be read.
            ValueError: the data does not suit the task.
        """

    def fitted(self, data: Dataset) -> Task:
        """This task with the fields of the model's config that depend on the data."""
        return self

    def extra(self, data: Dataset) -> Extra:
        """The part of the data that checkpoints store."""
        return {}

    def check_extra(self, extra: Extra) -> None:
        """Raises ValueError unless this could be the extra data of a model of this task."""
        check_extra_keys(extra)

    def build(self, attn_implementation: AttnImplementation) -> nn.Module:
        """A new model, on the CPU."""
        return self.model_type(self.model, attn_implementation=attn_implementation)

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """Number of tokens in a batch, without padding."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """Number of terms in each sum of `losses`, by the same names."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Sums of losses in nats, by name.

        Training minimises the sum of their means. Each mean is over the whole batch, regardless of
        its micro-batches.
        """

    def carry(self, model: nn.Module, batch: Batch, state: State) -> tuple[Losses, State]:
        """`losses` of a batch that continues earlier ones, and the state for the next batch."""
        return self.losses(model, batch), ()

    @abstractmethod
    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
        """Score on held-out batches, easier to interpret than their mean loss, which is given."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return {"kind": self.kind} | asdict(self)


class RecurrentTask(Task):
    """Task of a model with a state; its data are a `LaneDataset`.

    A trainer passes the state of each lane on from batch to batch. At the end of the lanes, it
    continues at their beginnings with an empty state.
    """

    @abstractmethod
    def carry(self, model: nn.Module, batch: Batch, state: State) -> tuple[Losses, State]: ...

    @abstractmethod
    def state_shapes(self, lanes: int, segments: int) -> Shapes:
        """Shapes of the state after `segments` segments of each lane, at least one."""

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        return self.carry(model, batch, ())[0]


class TokenizedTask(Task):
    """Base of the tasks whose datasets have a tokenizer `tokens`, which checkpoints store."""

    special: ClassVar[bool] = False
    """True if the tokenizer has special tokens"""
    extra_names: ClassVar[tuple[str, ...]] = ("tokens",)
    """Keys of the extra data"""

    @property
    def vocabulary(self) -> int:
        """Largest number of tokens that the model can have."""
        size: int = self.model.vocabulary
        return size

    def tokens_for(self, text: Callable[[], bytes], extra: Extra | None) -> Tokens:
        """The tokenizer of a checkpoint's extra data, or a new one, trained on a text."""
        if extra is not None:
            return Tokens.from_json(extra["tokens"])
        return train_tokens(text(), self.vocabulary, special=self.special)

    def extra(self, data: Dataset) -> Extra:
        with_tokens: Any = data
        return {"tokens": with_tokens.tokens.to_json()}

    def check_extra(self, extra: Extra) -> None:
        check_extra_keys(extra, *self.extra_names)
        tokens = Tokens.from_json(extra["tokens"])
        if tokens.vocabulary > self.vocabulary or tokens.special != self.special:
            raise ValueError(
                f"extra.tokens must have at most {self.vocabulary} tokens and "
                f"special={self.special}, got {tokens.vocabulary} and special={tokens.special}"
            )


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

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        log_p = model(batch[self.text], batch["lengths"])
        return {self.target: nn.functional.nll_loss(log_p, batch[self.label], reduction="sum")}

    def score(self, model: nn.Module, data: Dataset, batches: Batches, loss: float) -> float:
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


def check_extra_keys(extra: Extra, *names: str) -> None:
    """Raises ValueError unless extra data has these keys."""
    if set(extra) != set(names):
        raise ValueError(f"extra must have the keys {list(names)}, got {list(map(shown, extra))}")


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy, summed over all targets except padding.

    The smoothed distribution q of a target y is 1 - smoothing for y, 0 for `pad`, and
    smoothing / (V - 2) for every other token. The loss of a target is -Σ q log softmax(logits). It
    exceeds KL(q || softmax(logits)), which has the same gradient, by the entropy of q:

        -(1 - smoothing) log(1 - smoothing) - smoothing log(smoothing / (V - 2))

    Without smoothing it equals torch's `cross_entropy(ignore_index=pad, reduction="sum")`.

    Args:
        logits: (..., V), any floating dtype; half precision is computed and summed in float32.
        targets: (...) int64, tokens; targets equal to `pad` are ignored.
        smoothing: probability mass moved away from the target, at least 0 and below 1.
        pad: the padding token.

    Returns:
        the sum in nats, a float32 scalar (float64 for float64 logits), and the number of targets,
        an int64 scalar.

    Raises:
        TypeError, ValueError: an argument is not as above. Values of targets are checked only on
            the CPU.

    Source: Rethinking the Inception Architecture (Szegedy et al. 2016), section 7; Attention Is All
    You Need, section 5.4; excluding the padding token follows The Annotated Transformer.
    """
    _check_loss_arguments(logits, targets, smoothing, pad)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = nn.functional.log_softmax(logits, dim=-1, dtype=dtype)
    target_log_p = log_p.gather(-1, targets[..., None])[..., 0]
    losses = -target_log_p
    if smoothing > 0.0:
        other_log_p = log_p.sum(dim=-1) - target_log_p - log_p[..., pad]
        share = smoothing / (logits.shape[-1] - 2)
        losses = (1.0 - smoothing) * losses - share * other_log_p
    counts = targets != pad
    return losses.masked_fill(~counts, 0.0).sum(), counts.sum()


def _check_loss_arguments(logits: Tensor, targets: Tensor, smoothing: float, pad: int) -> None:
    check_probability("smoothing", smoothing)
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be of a floating dtype, got {logits.dtype}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if logits.dim() == 0 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            "logits must be (..., V) and targets (...), "
            f"got shapes {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    V = logits.shape[-1]
    if smoothing > 0.0 and V < 3:
        raise ValueError(f"logits must have at least 3 tokens to smooth over, got {V}")
    if not 0 <= pad < V:
        raise ValueError(f"pad must be a token from 0 to {V - 1}, got {pad}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or not targets.numel():
        return
    smallest, largest = (int(x) for x in targets.aminmax())
    if smallest < 0 or largest >= V:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"targets must be tokens from 0 to {V - 1}, got {wrong}")


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, ignored: int = -100) -> Tensor:
    """Cross entropy in nats, summed over all targets except those equal to `ignored`.

    logits are (..., V), and half precision is computed and summed in float32; targets are (...)
    int64. Returns a scalar, float32 (float64 for float64 logits).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum"
    )
