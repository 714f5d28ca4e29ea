"""Training runs: start a run, resume it from a checkpoint, or load its model."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from torch import nn

from ..models.generator import TextGenerator
from ..nn.options import AttnImplementation, check_device
from .checkpoint import CURVE as CURVE
from .checkpoint import Checkpoint, find_checkpoint, remove_leftovers, write_checkpoint
from .config import TrainConfig
from .curves import CurveRow, append_to_curve, rewrite_curve
from .data import Dataset
from .distributed import SINGLE_PROCESS, DistributedContext
from .task import Extra, Task
from .trainer import Trainer

PICTURE = "curve.png"

OnRow = Callable[[CurveRow], None]
ShouldStop = Callable[[], bool]


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: the trained model and its learning curve, one row per step.

    The parameters of the model are DTensors if the run divides them over processes.
    """

    config: TrainConfig
    model: nn.Module
    rows: list[CurveRow]
    checkpoint: Path | None = None
    """Folder of the last checkpoint, if any"""

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, in nats."""
        return [row.train_loss for row in self.rows]

    @property
    def seconds(self) -> float:
        """Time of all training steps."""
        return self.rows[-1].seconds

    @property
    def tokens_per_s(self) -> float:
        """Mean speed of the run, in `Task.unit` per second."""
        return self.rows[-1].tokens / self.rows[-1].seconds

    @property
    def score(self) -> float | None:
        """Score of the last validation (`Task.score_name`); None if there was none."""
        return next((row.score for row in reversed(self.rows) if row.score is not None), None)

    @property
    def finished(self) -> bool:
        """True if the run did all its steps, False if it was stopped early."""
        return self.rows[-1].step == self.config.steps


class TrainingRun:
    """A run that is set up and ready to train; made by `start` or `resume`.

    Attributes:
        trainer: model, optimizer and data.
        rows: the curve so far.
        folder: the output folder, or None for no files.
        checkpoint: folder of the last checkpoint, or None.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        folder: Path | None = None,
        lock: FileLock | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Makes a run; see `start` and `resume`. The main process has the lock of the folder."""
        self.trainer = trainer
        self.rows = [] if checkpoint is None else checkpoint.rows()
        self.folder = folder
        self.checkpoint = None if checkpoint is None else checkpoint.folder
        self._lock = lock

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
        distributed: DistributedContext = SINGLE_PROCESS,
    ) -> TrainingRun:
        """Sets up a new run; see `train`."""
        trainer = Trainer(config, data, distributed)
        folder = None if out is None else Path(out)
        if folder is None or not distributed.is_main:
            return cls(trainer, folder=folder)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as lock:
            for name in sorted(path.name for path in folder.iterdir()):
                if name.startswith(("checkpoint", "curve.")):
                    raise FileExistsError(
                        f"{folder} already holds a run ({name}): resume it, or choose another "
                        "folder"
                    )
            rewrite_curve(folder / CURVE, ())
            return cls(trainer, folder=folder, lock=lock)

    @classmethod
    def resume(
        cls,
        checkpoint: Path | str,
        *,
        data: Dataset | None = None,
        source: Path | None = None,
        kind: str | Sequence[str] = (),
        distributed: DistributedContext = SINGLE_PROCESS,
    ) -> TrainingRun:
        """Sets up the rest of an interrupted run; see `resume`.

        `source` is the path of the data, if it has moved. `kind` is the accepted kind or kinds of
        task; empty accepts all.
        """
        folder = find_checkpoint(checkpoint).parent
        with _locked(folder) if distributed.is_main else nullcontext() as lock:
            found = Checkpoint.open(checkpoint, kind)
            metadata = found.metadata
            if data is None:
                if source is None and metadata.data.source is not None:
                    source = Path(metadata.data.source)
                data = metadata.config.task.data(source, metadata.extra)
            trainer = Trainer(metadata.config, data, distributed)
            trainer.restore(found)
            run = cls(trainer, folder=folder, lock=lock, checkpoint=found)
            if lock is not None:
                rewrite_curve(folder / CURVE, run.rows)
            return run

    def train(
        self, *, on_row: OnRow | None = None, should_stop: ShouldStop | None = None
    ) -> TrainResult:
        """Trains the remaining steps; see `train`."""
        if self._lock is None:
            return self._train(on_row, should_stop)
        _acquire(self._lock)
        try:
            return self._train(on_row, should_stop)
        finally:
            self._lock.release(force=True)

    def _train(self, on_row: OnRow | None, should_stop: ShouldStop | None) -> TrainResult:
        stopped = False
        while self.trainer.steps_done < self.config.steps and not stopped:
            row = self._step()
            self.rows.append(row)
            stop = should_stop is not None and should_stop()
            stopped = any(self.trainer.distributed.all_gather(stop))
            if self.folder is not None and self._lock is not None:
                append_to_curve(self.folder / CURVE, row)
            if stopped or self._is_due(row.step):
                self._save()
            if on_row is not None:
                on_row(row)
        return TrainResult(self.config, self.trainer.model, self.rows, self.checkpoint)

    def _save(self) -> None:
        """Writes a checkpoint: by the main process, or by all if parameters are divided."""
        distributed = self.trainer.distributed
        metadata, tensors = self.trainer.state()
        if self.folder is None:
            return
        if distributed.sharded:
            self.checkpoint = write_checkpoint(
                self.folder, metadata, tensors, self.rows, distributed
            )
        elif distributed.is_main:
            self.checkpoint = write_checkpoint(self.folder, metadata, tensors, self.rows)

    def _step(self) -> CurveRow:
        """Trains one step, and validates if a validation is due."""
        before = self.rows[-1] if self.rows else None
        start = time.perf_counter()
        done = self.trainer.step()
        elapsed = time.perf_counter() - start
        step = self.trainer.steps_done
        validated = None
        distributed = self.trainer.distributed
        if self._is_due(step) and (distributed.is_main or distributed.forward_is_collective):
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
    """Trains a model from scratch. Seeds torch's global generators with the config's seed.

    Args:
        config: settings of the run.
        data: dataset to train and validate on.
        out: folder for the checkpoint and the curve (CSV), created if missing; None for no files.
        on_row: called after each step with its curve row.
        should_stop: called after each step; True makes the run save a checkpoint and end.

    Returns:
        the trained model and its curve.

    Raises:
        ValueError: the settings do not fit the data, the device or the number of processes.
        FileExistsError: the folder already holds a run; nothing is overwritten.
        BlockingIOError: another process is training in the folder.
        OSError: the folder cannot be written, or the disk is full. Files that exist stay whole.
        FloatingPointError: a loss or a gradient is not finite; that step is not saved.
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
    """Resumes an interrupted run in the folder of its checkpoint, and trains it to the end.

    On the same machine, with the same number of threads, every loss is bit-identical to that of an
    uninterrupted run.

    Args:
        checkpoint: checkpoint of the run.
        data: dataset of the run; None reads it again from its original source.
        on_row: as in `train`.
        should_stop: as in `train`.

    Returns:
        the trained model and its curve, including the steps before the checkpoint.

    Raises:
        CheckpointError: the checkpoint is not valid or does not belong to this data.
        BlockingIOError, ValueError, OSError, FloatingPointError: as in `train`.
    """
    run = TrainingRun.resume(checkpoint, data=data)
    return run.train(on_row=on_row, should_stop=should_stop)


class LoadedModel(NamedTuple):
    """A trained model, loaded for inference."""

    model: nn.Module
    """In evaluation mode"""
    task: Task
    extra: Extra
    """Data that the model needs, such as its vocabulary; see `Task.extra`"""
    source: Path | None
    """Path of the data that it was trained on; None for the default data"""


def load_model(
    checkpoint: Path | str,
    *kinds: str,
    attn_implementation: AttnImplementation = "fused",
    device: str = "cpu",
) -> LoadedModel:
    """Loads the trained model of a checkpoint.

    Args:
        checkpoint: file written by a training run.
        kinds: accepted kinds of task (`Task.kind`); none accepts all.
        attn_implementation: attention implementation of the model.
        device: torch device of the model.

    Returns:
        the model in evaluation mode, its task, its extra data and the path of its data.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: the file is not a checkpoint of an accepted kind, or an entry that the
            model needs is absent or invalid.
        ValueError: the device cannot be used.
    """
    check_device(device)
    found = Checkpoint.open(checkpoint, kinds)
    task, source = found.metadata.config.task, found.metadata.data.source
    model = task.build(attn_implementation)
    weights = found.read(model.state_dict(prefix="model."), "model.")
    model.load_state_dict({name.removeprefix("model."): x for name, x in weights.items()})
    path = None if source is None else Path(source)
    return LoadedModel(model.to(device).eval(), task, found.metadata.extra, path)


def load_generator(
    checkpoint: Path | str,
    *,
    attn_implementation: AttnImplementation = "fused",
    device: str = "cpu",
) -> TextGenerator:
    """Loads the text generator of a checkpoint, in evaluation mode; see `load_model`."""
    model = load_model(
        checkpoint, "generator", attn_implementation=attn_implementation, device=device
    ).model
    assert isinstance(model, TextGenerator)
    return model


@contextmanager
def _locked(folder: Path) -> Iterator[FileLock]:
    """Locks a folder, for as long as the run that is made in the context needs it.

    Removes what a process that was killed left behind.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    _acquire(lock)
    try:
        remove_leftovers(folder)
        yield lock
    except BaseException:
        lock.release(force=True)
        raise


def _acquire(lock: FileLock) -> None:
    try:
        if not lock.is_locked:
            lock.acquire()
    except Timeout:
        reason, folder = "another process is training in this folder", Path(lock.lock_file).parent
        raise BlockingIOError(errno.EWOULDBLOCK, reason, str(folder)) from None
