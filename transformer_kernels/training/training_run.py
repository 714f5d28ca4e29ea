"""Training runs: start a run, resume it from a checkpoint, or load its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..models.generator import TextGenerator
from ..nn.options import AttnImplementation, check_device
from .checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    save_sharded_checkpoint,
    shards_of,
)
from .checkpoint_schema import check_model, check_progress, config_of, entry
from .config import TrainConfig
from .curves import (
    CurveRow,
    append_to_curve,
    rewrite_curve,
    rows_from_tensor,
    rows_to_tensor,
    start_curve,
)
from .data import Dataset
from .distributed import SINGLE_PROCESS, DistributedContext
from .output_files import FolderLock, remove_temporary_files
from .shard_files import remove_shards, shard_folders
from .task import Extra, Task
from .trainer import Trainer

CHECKPOINT = "checkpoint.pt"
CURVE = "curve.csv"
PICTURE = "curve.png"
FILES = (CHECKPOINT, CURVE, PICTURE)

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
    """A run that is set up and ready to train; made by `start` or `resume`."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        rows: list[CurveRow],
        folder: Path | None,
        lock: FolderLock | None = None,
        shards: Path | None = None,
    ) -> None:
        """Makes a run; see `start` and `resume`.

        Args:
            trainer: model, optimizer and data.
            rows: the curve so far.
            folder: the output folder, or None for no files.
            lock: the lock of the folder; None makes one.
            shards: the output folder on all ranks, for the files that each of them writes if
                parameters are divided.
        """
        self.trainer = trainer
        self.rows = rows
        self.folder = folder
        self._shards = shards
        self._lock = None if folder is None else lock or FolderLock(folder)

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
        """Sets up a new run; see `train`. Only the main process writes files."""
        trainer = Trainer(config, data, distributed)
        if out is None:
            return cls(trainer, rows=[], folder=None)
        folder = Path(out)
        if not distributed.is_main:
            return cls(trainer, rows=[], folder=None, shards=folder)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder) as lock:
            present = [path.name for path in map(folder.joinpath, FILES) if path.exists()]
            if distributed.sharded:
                present += [path.name for path in shard_folders(folder)]
            if present:
                raise FileExistsError(
                    f"{folder} already holds a run ({present[0]}): resume it, or choose another "
                    "folder"
                )
            start_curve(folder / CURVE)
            return cls(trainer, rows=[], folder=folder, lock=lock, shards=folder)

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
        path = Path(checkpoint)
        if not distributed.is_main:
            return cls._restored(path, data, source, kind, distributed)
        with path.open("rb"):  # a missing checkpoint must not leave the file of a lock
            pass
        with _locked(path.parent) as lock:
            run = cls._restored(path, data, source, kind, distributed)
            rewrite_curve(path.parent / CURVE, run.rows)
            return cls(
                run.trainer, rows=run.rows, folder=path.parent, lock=lock, shards=path.parent
            )

    @classmethod
    def _restored(
        cls,
        path: Path,
        data: Dataset | None,
        source: Path | None,
        kind: str | Sequence[str],
        distributed: DistributedContext,
    ) -> TrainingRun:
        """The state of a checkpoint, as a run without files; arguments as of `resume`."""
        state = load_checkpoint(path, kind=kind, described=distributed.sharded)
        with _naming_checkpoint(path):
            config = config_of(state)
            check_model(state, config.task)
            check_progress(state, config)
        if data is None:
            if source is None and state["data"]["source"] is not None:
                source = Path(state["data"]["source"])
            data = config.task.data(source, state["extra"])
        trainer = Trainer(config, data, distributed)
        with _naming_checkpoint(path):
            trainer.restore(state, shards_of(state, path))
        return cls(trainer, rows=rows_from_tensor(state["rows"]), folder=None, shards=path.parent)

    def train(
        self, *, on_row: OnRow | None = None, should_stop: ShouldStop | None = None
    ) -> TrainResult:
        """Trains the remaining steps; see `train`."""
        with self._lock or nullcontext():
            return self._train(on_row, should_stop)

    def _train(self, on_row: OnRow | None, should_stop: ShouldStop | None) -> TrainResult:
        stopped = False
        while self.trainer.steps_done < self.config.steps and not stopped:
            row = self._step()
            self.rows.append(row)
            stopped = self.trainer.distributed.any(should_stop is not None and should_stop())
            state = self.trainer.state() if stopped or self._is_due(row.step) else None
            if self.folder is not None:
                append_to_curve(self.folder / CURVE, row)
            if state is not None:
                self._save(state | {"rows": rows_to_tensor(self.rows)})
            if on_row is not None:
                on_row(row)
        return TrainResult(self.config, self.trainer.model, self.rows)

    def _save(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint: by the main process, or by all if parameters are divided."""
        kind, distributed = self.config.task.kind, self.trainer.distributed
        if distributed.sharded and self._shards is not None:
            path = self._shards / CHECKPOINT
            save_sharded_checkpoint(state, path, kind=kind, distributed=distributed)
        elif self.folder is not None:
            save_checkpoint(state, self.folder / CHECKPOINT, kind=kind)
            remove_shards(self.folder)

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
    state = load_checkpoint(checkpoint, kind=kinds)
    with _naming_checkpoint(checkpoint):
        task = config_of(state).task
        check_model(state, task)
        source = entry(state, "data.source", str, type(None)) if "data" in state else None
    model = task.build(attn_implementation)
    model.load_state_dict(state["model"])
    path = None if source is None else Path(source)
    return LoadedModel(model.to(device).eval(), task, state["extra"], path)


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
def _naming_checkpoint(path: Path | str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[FolderLock]:
    """Locks a folder, for as long as the run that is made in the context needs it.

    Removes what a process that was killed left behind.
    """
    lock = FolderLock(folder)
    lock.acquire()
    try:
        remove_temporary_files(folder, *FILES)
        yield lock
    except BaseException:
        lock.release()
        raise
