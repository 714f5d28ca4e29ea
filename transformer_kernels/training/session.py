"""Whole runs: train a model from the start, go on from a checkpoint, or take its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from transformer_kernels.models.generator import TextGenerator
from transformer_kernels.nn.options import AttnImplementation, check_device
from transformer_kernels.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from transformer_kernels.training.config import TrainConfig
from transformer_kernels.training.curves import (
    CurveRow,
    append_to_curve,
    rewrite_curve,
    rows_from_tensor,
    rows_to_tensor,
    start_curve,
)
from transformer_kernels.training.data import Dataset
from transformer_kernels.training.distributed import SINGLE_PROCESS, DistributedContext
from transformer_kernels.training.task import Extra, Task
from transformer_kernels.training.trainer import Trainer

CHECKPOINT = "checkpoint.pt"
CURVE = "curve.csv"
PICTURE = "curve.png"

OnRow = Callable[[CurveRow], None]
ShouldStop = Callable[[], bool]


@dataclass(frozen=True)
class TrainResult:
    """What a run gave: the trained model and its curve, one row a step."""

    config: TrainConfig
    model: nn.Module
    rows: list[CurveRow]

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats."""
        return [row.train_loss for row in self.rows]

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return self.rows[-1].seconds

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run."""
        return self.rows[-1].tokens / self.rows[-1].seconds

    @property
    def score(self) -> float | None:
        """On held-out data, at the last validation (`Task.score_name`); None if there was none."""
        return next((row.score for row in reversed(self.rows) if row.score is not None), None)

    @property
    def finished(self) -> bool:
        """Whether the run did all its steps, and was not stopped before."""
        return self.rows[-1].step == self.config.steps


class TrainingRun:
    """A run that is set up, and has yet to be trained."""

    def __init__(self, trainer: Trainer, *, rows: list[CurveRow], folder: Path | None) -> None:
        """`rows` are those of the steps done; see `start` and `resume` for the ways to make one."""
        self.trainer = trainer
        self.rows = rows
        self.folder = folder

    @property
    def config(self) -> TrainConfig:
        return self.trainer.config

    @classmethod
    def start(
        cls,
        config: TrainConfig,
        data: Dataset,
        *,
        out: Path | str | None = None,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> TrainingRun:
        """See `train`. The first of several processes writes, for all."""
        trainer = Trainer(config, data, ranks)
        if out is None or not ranks.is_first:
            return cls(trainer, rows=[], folder=None)
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CHECKPOINT, CURVE, PICTURE):
            if (folder / name).exists():
                raise FileExistsError(
                    f"{folder} holds a run already ({name}): resume it, or choose another folder"
                )
        start_curve(folder / CURVE)
        return cls(trainer, rows=[], folder=folder)

    @classmethod
    def resume(
        cls,
        checkpoint: Path | str,
        *,
        data: Dataset | None = None,
        source: Path | None = None,
        kind: str | Sequence[str] = (),
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> TrainingRun:
        """See `resume`; `source` is where the data lies now, and `kind` what the run has to be."""
        path = Path(checkpoint)
        state = load_checkpoint(path, kind=kind)
        config = _config(state, path)
        if data is None:
            if source is None and state["data"]["source"] is not None:
                source = Path(state["data"]["source"])
            data = config.task.data(source, state["extra"])
        trainer = Trainer(config, data, ranks)
        trainer.restore(state)
        rows = rows_from_tensor(state["rows"])
        if not ranks.is_first:
            return cls(trainer, rows=rows, folder=None)
        rewrite_curve(path.parent / CURVE, rows)
        return cls(trainer, rows=rows, folder=path.parent)

    def train(
        self, *, on_row: OnRow | None = None, should_stop: ShouldStop | None = None
    ) -> TrainResult:
        """Does the steps that are left; see `train`."""
        stopped = False
        while self.trainer.steps_done < self.config.steps and not stopped:
            row = self._step()
            self.rows.append(row)
            stopped = self.trainer.ranks.any(should_stop is not None and should_stop())
            state = self.trainer.state() if stopped or self._is_due(row.step) else None
            if self.folder is not None:
                append_to_curve(self.folder / CURVE, row)
                if state is not None:
                    rows = rows_to_tensor(self.rows)
                    save_checkpoint(
                        state | {"rows": rows}, self.folder / CHECKPOINT, kind=self.config.task.kind
                    )
            if on_row is not None:
                on_row(row)
        return TrainResult(self.config, self.trainer.model, self.rows)

    def _step(self) -> CurveRow:
        """One step, and a validation where one is due."""
        before = self.rows[-1] if self.rows else None
        start = time.perf_counter()
        done = self.trainer.step()
        elapsed = time.perf_counter() - start
        step = self.trainer.steps_done
        validated = None
        if self._is_due(step) and self.trainer.ranks.is_first:
            validated = self.trainer.validate()
        return CurveRow(
            step=step,
            tokens=done.tokens + (0 if before is None else before.tokens),
            seconds=elapsed + (0.0 if before is None else before.seconds),
            train_loss=done.loss,
            val_loss=None if validated is None else validated.loss,
            score=None if validated is None else validated.score,
            tokens_per_s=done.tokens / elapsed,
        )

    def _is_due(self, step: int) -> bool:
        return step % self.config.eval_every == 0 or step == self.config.steps


def train(
    config: TrainConfig,
    data: Dataset,
    *,
    out: Path | str | None = None,
    on_row: OnRow | None = None,
    should_stop: ShouldStop | None = None,
) -> TrainResult:
    """Trains a model from the start; seeds torch's generators with the config's seed.

    `out` is a folder for the checkpoint and the curve (CSV), made where it is missing; without it
    nothing is written. `on_row` is called after each step. `should_stop` is asked after each step;
    where it says so, the run saves its checkpoint and ends early.

    ValueError where something does not fit; OSError where the folder cannot be written, or holds a
    run already (FileExistsError: nothing is overwritten); FloatingPointError where a loss or a
    gradient is not finite, before anything of it is saved.
    """
    run = TrainingRun.start(config, data, out=out)
    return run.train(on_row=on_row, should_stop=should_stop)


def resume(
    checkpoint: Path | str,
    *,
    data: Dataset | None = None,
    on_row: OnRow | None = None,
    should_stop: ShouldStop | None = None,
) -> TrainResult:
    """Goes on from a checkpoint, in its folder, to the end of the run it belongs to.

    On the same machine, with the same number of threads, every loss is the one, bit for bit, that
    the run would have had without the break. The data is read anew from where it came from, unless
    given. Errors as in `train`, and CheckpointError.
    """
    run = TrainingRun.resume(checkpoint, data=data)
    return run.train(on_row=on_row, should_stop=should_stop)


class LoadedModel(NamedTuple):
    """What a checkpoint is read for when nothing more is to be trained."""

    model: nn.Module
    """In evaluation mode"""
    task: Task
    extra: Extra


def load_model(
    checkpoint: Path | str,
    *kinds: str,
    attn_implementation: AttnImplementation = "fused",
    device: str = "cpu",
) -> LoadedModel:
    """The model of a checkpoint of one of these kinds (`Task.kind`). OSError or CheckpointError."""
    check_device(device)
    state = load_checkpoint(checkpoint, kind=kinds)
    task = _config(state, checkpoint).task
    model = task.build(attn_implementation)
    model.load_state_dict(state["model"])
    return LoadedModel(model.to(device).eval(), task, state["extra"])


def load_generator(
    checkpoint: Path | str,
    *,
    attn_implementation: AttnImplementation = "fused",
    device: str = "cpu",
) -> TextGenerator:
    """The text generator of a checkpoint, ready to write; see `load_model`."""
    model = load_model(
        checkpoint, "generator", attn_implementation=attn_implementation, device=device
    ).model
    assert isinstance(model, TextGenerator)
    return model


def _config(state: dict[str, Any], path: Path | str) -> TrainConfig:
    try:
        return TrainConfig.from_dict(state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the config in {path} is not one of this version: {error}") from None
