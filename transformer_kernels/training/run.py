"""Whole runs: train a generator from the start, go on from a checkpoint, or take its model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_kernels.models.generator import TextGenerator
from transformer_kernels.nn.options import AttentionPath, check_device
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
from transformer_kernels.training.data import Corpus, load_corpus
from transformer_kernels.training.trainer import GeneratorTrainer

KIND = "text generator"
CHECKPOINT = "checkpoint.pt"
CURVE = "curve.csv"
PICTURE = "curve.png"

OnRow = Callable[[CurveRow], None]
ShouldStop = Callable[[], bool]


@dataclass(frozen=True)
class TrainResult:
    """What a run gave: the trained model and its curve, one row a step."""

    config: TrainConfig
    model: TextGenerator
    rows: list[CurveRow]

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats a byte."""
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
    def bits_per_byte(self) -> float | None:
        """On held-out text, at the last validation; None where there was none."""
        return next((b for *_, b, _ in reversed(self.rows) if b is not None), None)

    @property
    def finished(self) -> bool:
        """Whether the run did all its steps, and was not stopped before."""
        return self.rows[-1].step == self.config.steps


class GeneratorRun:
    """A run that is set up, and has yet to be trained."""

    def __init__(
        self, trainer: GeneratorTrainer, *, rows: list[CurveRow], folder: Path | None
    ) -> None:
        """`rows` are those of the steps done; see `start` and `resume` for the ways to make one."""
        self.trainer = trainer
        self.rows = rows
        self.folder = folder

    @property
    def config(self) -> TrainConfig:
        return self.trainer.config

    @classmethod
    def start(
        cls, config: TrainConfig, corpus: Corpus, *, out: Path | str | None = None
    ) -> GeneratorRun:
        """See `train_generator`."""
        trainer = GeneratorTrainer(config, corpus)
        if out is None:
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
    def resume(cls, checkpoint: Path | str, *, corpus: Corpus | None = None) -> GeneratorRun:
        """See `resume_generator`."""
        path = Path(checkpoint)
        state = load_checkpoint(path, kind=KIND)
        config = _config(state, path)
        if corpus is None:
            corpus = load_corpus(state["corpus"]["source"])
        trainer = GeneratorTrainer(config, corpus)
        trainer.restore(state)
        rows = rows_from_tensor(state["rows"])
        rewrite_curve(path.parent / CURVE, rows)
        return cls(trainer, rows=rows, folder=path.parent)

    def train(
        self, *, on_row: OnRow | None = None, should_stop: ShouldStop | None = None
    ) -> TrainResult:
        """Does the steps that are left; see `train_generator`."""
        stopped = False
        while self.trainer.steps_done < self.config.steps and not stopped:
            row = self._step()
            self.rows.append(row)
            stopped = should_stop is not None and should_stop()
            if self.folder is not None:
                append_to_curve(self.folder / CURVE, row)
                if stopped or row.val_loss is not None:
                    self._save(self.folder / CHECKPOINT)
            if on_row is not None:
                on_row(row)
        return TrainResult(self.config, self.trainer.model, self.rows)

    def _step(self) -> CurveRow:
        """One step, and a validation where one is due."""
        seconds = self.rows[-1].seconds if self.rows else 0.0
        start = time.perf_counter()
        train_loss = self.trainer.step()
        elapsed = time.perf_counter() - start
        step = self.trainer.steps_done
        due = step % self.config.eval_every == 0 or step == self.config.steps
        val_loss = self.trainer.validate() if due else None
        return CurveRow(
            step=step,
            tokens=step * self.config.tokens_per_step,
            seconds=seconds + elapsed,
            train_loss=train_loss,
            val_loss=val_loss,
            bits_per_byte=None if val_loss is None else val_loss / math.log(2),
            tokens_per_s=self.config.tokens_per_step / elapsed,
        )

    def _save(self, path: Path) -> None:
        state = self.trainer.state() | {"rows": rows_to_tensor(self.rows)}
        save_checkpoint(state, path, kind=KIND)


def train_generator(
    config: TrainConfig,
    corpus: Corpus,
    *,
    out: Path | str | None = None,
    on_row: OnRow | None = None,
    should_stop: ShouldStop | None = None,
) -> TrainResult:
    """Trains a text generator from the start; seeds torch's generators with the config's seed.

    `out` is a folder for the checkpoint and the curve (CSV), made where it is missing; without it
    nothing is written. `on_row` is called after each step. `should_stop` is asked after each step;
    where it says so, the run saves its checkpoint and ends early.

    ValueError where the corpus is too short; OSError where the folder cannot be written, or holds a
    run already (FileExistsError: nothing is overwritten); FloatingPointError where a loss or a
    gradient is not finite, before anything of it is saved.
    """
    run = GeneratorRun.start(config, corpus, out=out)
    return run.train(on_row=on_row, should_stop=should_stop)


def resume_generator(
    checkpoint: Path | str,
    *,
    corpus: Corpus | None = None,
    on_row: OnRow | None = None,
    should_stop: ShouldStop | None = None,
) -> TrainResult:
    """Goes on from a checkpoint, in its folder, to the end of the run it belongs to.

    On the same machine, with the same number of threads, every loss is the one, bit for bit, that
    the run would have had without the break. The corpus is read anew from where it came from,
    unless given. Errors as in `train_generator`, and CheckpointError.
    """
    run = GeneratorRun.resume(checkpoint, corpus=corpus)
    return run.train(on_row=on_row, should_stop=should_stop)


def load_generator(
    checkpoint: Path | str, *, attention: AttentionPath = "fused", device: str = "cpu"
) -> TextGenerator:
    """The model of a checkpoint, ready to generate. OSError or CheckpointError."""
    check_device(device)
    state = load_checkpoint(checkpoint, kind=KIND)
    model = TextGenerator(_config(state, checkpoint).model, attention=attention)
    model.load_state_dict(state["model"])
    return model.to(device).eval()


def _config(state: dict[str, Any], path: Path | str) -> TrainConfig:
    try:
        return TrainConfig.from_dict(state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the config in {path} is not one of this version: {error}") from None
