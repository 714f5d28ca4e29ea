"""Base class of training tasks: a model with its data, losses and score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..common.argument_checks import shown
from ..nn.options import AttnImplementation
from .data import Batch, Dataset, Tokens

Extra = dict[str, Any]
"""Data that a model needs for inference, such as its vocabulary: plain values for checkpoints"""

State = tuple[Tensor, ...]
"""State that a model carries from batch to batch; dimension 0 is the batch dimension. No gradient
flows through it. The empty tuple starts anew."""

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
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums of losses in nats, by name.

        Training minimises the sum of their means. Each mean is over the whole batch, regardless of
        its micro-batches.
        """

    def carry(
        self, model: nn.Module, batch: Batch, state: State
    ) -> tuple[dict[str, Tensor], State]:
        """`losses` of a batch that continues earlier ones, and the state for the next batch."""
        return self.losses(model, batch), ()

    @abstractmethod
    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
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
    def carry(
        self, model: nn.Module, batch: Batch, state: State
    ) -> tuple[dict[str, Tensor], State]: ...

    @abstractmethod
    def state_shapes(self, lanes: int, segments: int) -> Shapes:
        """Shapes of the state after `segments` segments of each lane, at least one."""

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self.carry(model, batch, ())[0]


def check_extra_keys(extra: Extra, *names: str) -> None:
    """Raises ValueError unless extra data has these keys."""
    if set(extra) != set(names):
        raise ValueError(f"extra must have the keys {list(names)}, got {list(map(shown, extra))}")


def tokens_of(extra: Extra, *, vocabulary: int, special: bool = False) -> Tokens:
    """The tokenizer in the extra data of a checkpoint.

    Raises:
        ValueError: it is damaged, or is not one for a model with this vocabulary.
    """
    tokens = Tokens.from_json(extra["tokens"])
    if tokens.vocabulary > vocabulary or tokens.special != special:
        raise ValueError(
            f"extra.tokens must have at most {vocabulary} tokens and special={special}, "
            f"got {tokens.vocabulary} and special={tokens.special}"
        )
    return tokens
