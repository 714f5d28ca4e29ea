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

from ..common.optional_deps import require
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
        folder: the output folder, or None for no files.
        rows: the curve so far.
        checkpoint: folder of the last checkpoint, or None.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path | None = None,
        lock: FileLock | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Makes a run; see `start` and `resume`. The main process has the lock of the folder."""
        self.trainer = trainer
        self.folder = folder
        self.rows = [] if checkpoint is None else checkpoint.rows()
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
        folder = None if out is None else Path(out)
        if folder is not None:
            require("safetensors", extra="train")
        trainer = Trainer(config, data, distributed)
        if folder is None or not distributed.is_main:
            return cls(trainer, folder)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as lock:
            names = sorted(path.name for path in folder.iterdir())
            for name in (one for one in names if one.startswith(("checkpoint", "curve."))):
                raise FileExistsError(
                    f"{folder} already holds a run ({name}): resume it, or choose another folder"
                )
            rewrite_curve(folder / CURVE, ())
            return cls(trainer, folder, lock)

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
                if source is None and metadata.source is not None:
                    source = Path(metadata.source)
                data = metadata.config.task.data(source, metadata.extra)
            trainer = Trainer(metadata.config, data, distributed)
            trainer.restore(found)
            run = cls(trainer, folder, lock, found)
            if lock is not None:
                rewrite_curve(folder / CURVE, run.rows)
            return run

    def train(
        self, *, on_row: OnRow | None = None, should_stop: ShouldStop | None = None
    ) -> TrainResult:
        """Trains the remaining steps, and unlocks the folder; see `train`."""
        try:
            if self._lock is not None:
                _acquire(self._lock)
            stopped = False
            while self.trainer.steps_done < self.config.steps and not stopped:
                self.rows.append(self._step())
                stop = should_stop is not None and should_stop()
                stopped = any(self.trainer.distributed.all_gather(stop))
                self._write(checkpoint=stopped or self._is_due())
                if on_row is not None:
                    on_row(self.rows[-1])
        finally:
            if self._lock is not None:
                self._lock.release(force=True)
        return TrainResult(self.config, self.trainer.model, self.rows, self.checkpoint)

    def _step(self) -> CurveRow:
        """Trains one step, and validates if a validation is due."""
        start = time.perf_counter()
        done = self.trainer.step()
        elapsed = time.perf_counter() - start
        validated, distributed = None, self.trainer.distributed
        if self._is_due() and (distributed.is_main or distributed.forward_is_collective):
            validated = self.trainer.validate()
        before = self.rows[-1] if self.rows else None
        return CurveRow(
            step=self.trainer.steps_done,
            tokens=done.tokens + (0 if before is None else before.tokens),
            seconds=elapsed + (0.0 if before is None else before.seconds),
            train_loss=done.loss,
            val_loss=None if validated is None else validated.loss,
            score=None if validated is None else validated.score,
            tokens_per_s=done.tokens / elapsed,
        )

    def _is_due(self) -> bool:
        """True if a validation and a checkpoint follow the last step."""
        step = self.trainer.steps_done
        return step % self.config.eval_every == 0 or step == self.config.steps

    def _write(self, *, checkpoint: bool) -> None:
        """Writes the curve's last row, and a checkpoint: all ranks, if parameters are divided."""
        distributed = self.trainer.distributed
        state = self.trainer.state() if checkpoint else None
        if self.folder is not None and distributed.is_main:
            append_to_curve(self.folder / CURVE, self.rows[-1])
        if self.folder is None or state is None:
            return
        if distributed.sharded:
            self.checkpoint = write_checkpoint(self.folder, *state, self.rows, distributed)
        elif distributed.is_main:
            self.checkpoint = write_checkpoint(self.folder, *state, self.rows)


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
        out: folder for checkpoints and the curve (CSV), created if missing; None for no files.
        on_row: called after each step with its curve row.
        should_stop: called after each step; True makes the run save a checkpoint and end.

    Raises:
        ValueError: the settings do not fit the data, the device or the number of processes.
        FileExistsError: the folder already holds a run; nothing is overwritten.
        BlockingIOError: another process is training in the folder.
        OSError: the folder cannot be written, or the disk is full. Checkpoints stay whole.
        FloatingPointError: a loss or a gradient is not finite; that step is not saved.
    """
    return TrainingRun.start(config, data, out=out).train(on_row=on_row, should_stop=should_stop)


def resume(
    checkpoint: Path | str,
    *,
    data: Dataset | None = None,
    on_row: OnRow | None = None,
    should_stop: ShouldStop | None = None,
) -> TrainResult:
    """Resumes an interrupted run in its folder, and trains it to the end; see `train`.

    On the same machine, with the same number of threads, every loss is bit-identical to that of an
    uninterrupted run.

    Args:
        checkpoint: folder of the run, or of one of its checkpoints.
        data: dataset of the run; None reads it again from its original source.
        on_row: as in `train`.
        should_stop: as in `train`.

    Raises:
        CheckpointError: the checkpoint is not valid or does not belong to this data.
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
        checkpoint: folder of a run, for its newest checkpoint, or of one of its checkpoints.
        kinds: accepted kinds of task (`Task.kind`); none accepts all.
        attn_implementation: attention implementation of the model.
        device: torch device of the model.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: it is not a checkpoint of an accepted kind, or it is damaged.
        ValueError: the device cannot be used.
    """
    check_device(device)
    found = Checkpoint.open(checkpoint, kinds)
    task, source = found.metadata.config.task, found.metadata.source
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
    found = load_model(
        checkpoint, "generator", attn_implementation=attn_implementation, device=device
    )
    assert isinstance(found.model, TextGenerator)
    return found.model


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
