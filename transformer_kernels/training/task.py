"""What a run trains: a model, what it learns from, and what it loses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from transformer_kernels.nn.options import AttnImplementation
from transformer_kernels.training.data import Batch, Dataset

Extra = dict[str, Any]
"""What a model is of no use without, such as its vocabulary: plain values, kept in checkpoints"""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A model's config and options of its training; subclasses are in `training/tasks/`."""

    kind: ClassVar[str]
    """In one word, as the command line has it; checkpoints are of a kind"""
    unit: ClassVar[str]
    """What `tokens` counts, in the plural"""
    score_name: ClassVar[str]
    """What `score` is, for people"""

    config_type: ClassVar[Callable[..., Any]]
    """Of `model`"""

    model: Any
    """The model's config"""

    @abstractmethod
    def data(self, source: Path | None = None, extra: Extra | None = None) -> Dataset:
        """What is learned: files of the user's, or what every Python installation carries.

        `extra` is a checkpoint's: the data is then that of its run. OSError where files cannot be
        read, ValueError where they do not serve.
        """

    def fitted(self, data: Dataset) -> Task:
        """This one with what the data decides of the model's config."""
        return self

    def extra(self, data: Dataset) -> Extra:
        """What a checkpoint has to keep of the data."""
        return {}

    @abstractmethod
    def build(self, attn_implementation: AttnImplementation) -> nn.Module:
        """A new model, on the CPU."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """How much there is to read in a batch; padding is not counted."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """By the names of `losses`, how many terms their sums have."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums of losses in nats, by name. Training minimises the sum of their means; of each, the
        mean over the whole of a batch, however it is cut."""

    @abstractmethod
    def score(
        self, model: nn.Module, data: Dataset, batches: Iterable[Batch], loss: float
    ) -> float:
        """On held-out batches, whose loss is given: a figure that says more than it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return {"kind": self.kind} | asdict(self)
