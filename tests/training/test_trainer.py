"""Tests of the trainer: accumulation, precision, recomputation and processes keep the results."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.processes import torchrun
from tests.support.runtime import default_dtype
from tests.training.run_helpers import (
    assert_same_weights,
    overflow_gradients,
    weights_of,
    with_dropout,
    without_times,
)
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.nn import Stack
from transformer_kernels.training import (
    Checkpoint,
    Dataset,
    Precision,
    TrainConfig,
    Trainer,
    read_curve,
    resume,
    train,
)
from transformer_kernels.training.checkpoint import write_checkpoint
from transformer_kernels.training.distributed import DistributedContext
from transformer_kernels.training.trainer import MIN_LOSS_SCALE, split


def gradients(trainer: Trainer) -> list[Tensor]:
    trainer.step()
    return [p.grad for p in trainer.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_accumulated_gradients_and_losses_equal_those_of_the_whole_batch(
    config: TrainConfig, data: Dataset, parts: int
) -> None:
    config = replace(config, batch=7)
    with default_dtype(torch.float64):
        whole = Trainer(config, data)
        accumulated = Trainer(replace(config, accumulate=parts), data)
        for _ in range(3):
            assert_same_function(gradients(accumulated), gradients(whole))
        assert accumulated.step().loss == pytest.approx(whole.step().loss, rel=1e-10)


def test_recomputation_gives_identical_losses_with_dropout(
    config: TrainConfig, data: Dataset
) -> None:
    config = with_dropout(config, 0.3)
    plain, recomputed = (
        train(replace(config, recompute=enabled), data) for enabled in (False, True)
    )
    assert recomputed.losses == plain.losses
    assert_same_weights(recomputed.model, plain.model)
    assert [module.recompute for module in recomputed.model.modules() if isinstance(module, Stack)]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("attn_implementation", ["eager", "fused"])
def test_half_precision_losses_are_close_to_float32(
    config: TrainConfig, data: Dataset, precision: Precision, attn_implementation: Any
) -> None:
    """Products are in half precision; weights, gradients and losses are not."""
    config = replace(config, attn_implementation=attn_implementation, steps=30, eval_every=30)
    full = train(config, data)
    half = train(replace(config, precision=precision), data)
    assert half.losses != full.losses
    assert half.losses == pytest.approx(full.losses, rel=0.05)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    trainer = Trainer(replace(config, precision=precision), data)
    with trainer._autocast():
        tokens = data.held_out(1)["tokens"][:, :-1]
        assert trainer.model(tokens).dtype == getattr(torch, precision)


def test_gradient_overflow_halves_the_loss_scale_and_skips_the_update(
    config: TrainConfig, data: Dataset
) -> None:
    trainer = Trainer(replace(config, precision="float16"), data)
    before = weights_of(trainer)
    scale = trainer.scaler.get_scale()
    overflow_gradients(trainer)
    trainer.step()
    assert trainer.scaler.get_scale() == scale / 2
    assert trainer.steps_done == 1
    assert_same_weights(trainer.model, before)


def test_gradient_overflow_at_the_minimum_loss_scale_is_an_error(
    config: TrainConfig, data: Dataset
) -> None:
    trainer = Trainer(replace(config, precision="float16", steps=100), data)
    overflow_gradients(trainer)
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": MIN_LOSS_SCALE * 2})
    trainer.step()
    trainer.step()
    with pytest.raises(FloatingPointError, match=r"the gradient's norm is (inf|nan) after step 2"):
        trainer.step()


def test_float16_run_with_accumulation_and_recomputation_resumes_exactly(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    config = with_dropout(replace(config, precision="float16", accumulate=2, recompute=True), 0.2)
    whole = train(config, data)
    stop = iter((False, False, True))
    train(config, data, out=tmp_path, should_stop=lambda: next(stop))
    resumed = resume(tmp_path, data=data)
    assert without_times(resumed.rows) == without_times(whole.rows)
    assert_same_weights(resumed.model, whole.model)


def test_loss_scale_after_a_skipped_update_is_restored(
    config: TrainConfig, data: Dataset, tmp_path: Path
) -> None:
    config = replace(config, precision="float16")
    trainer = Trainer(config, data)
    hook = overflow_gradients(trainer)
    trainer.step()
    hook.remove()
    trainer.step()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, *trainer.state(), ()))
    assert (checkpoint.metadata.steps_done, checkpoint.metadata.updates) == (2, 1)
    resumed = Trainer(config, data)
    assert resumed.scaler.state_dict() != trainer.scaler.state_dict()
    resumed.restore(checkpoint)
    assert resumed.scaler.state_dict() == trainer.scaler.state_dict()
    assert resumed.step() == trainer.step()


def test_split_gives_micro_batches_of_nearly_equal_size() -> None:
    batch = {"tokens": torch.arange(14).reshape(7, 2), "lengths": torch.arange(7)}
    parts = split(batch, 3)
    assert [len(part["lengths"]) for part in parts] == [3, 2, 2]
    for name, x in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), x)


def test_batch_smaller_than_the_number_of_micro_batches_is_refused(
    config: TrainConfig, data: Dataset
) -> None:
    distributed = DistributedContext(0, 3)
    with pytest.raises(ValueError, match="the number of processes, 2 x 3, got 4"):
        Trainer(replace(config, accumulate=2), data, distributed)


def train_with_processes(count: int, kind: str, *words: str) -> subprocess.CompletedProcess[str]:
    return torchrun(count, "-m", "transformer_kernels", "train", kind, *words)


STOP_AFTER_FOUR_STEPS = """
import sys
from transformer_kernels import cli
from transformer_kernels.training import TrainingRun

train = TrainingRun.train
TrainingRun.train = lambda run, on_row, should_stop: train(
    run, on_row=on_row, should_stop=lambda: run.trainer.steps_done == 4
)
cli.main(sys.argv[1:])
"""


@pytest.mark.exhaustive
def test_two_processes_resume_memories_exactly(tmp_path: Path) -> None:
    """Each process gets back the memories of its own lanes, and its own dropout."""
    text, script = tmp_path / "text.txt", tmp_path / "stop.py"
    text.write_bytes(b"row, row, row your boat, gently down the stream\n" * 30)
    script.write_text(STOP_AFTER_FOUR_STEPS)
    options = (
        "train transformer-xl --layers 1 --width 8 --heads 2 --hidden 8 --context 12 --memory 20 "
        f"--dropout 0.2 --batch 5 --accumulate 2 --threads 1 --steps 8 --data {text} --out"
    ).split()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for words in (
        ("-m", "transformer_kernels", *options, str(whole)),
        (str(script), *options, str(stopped)),
    ):
        done = torchrun(2, *words)
        assert done.returncode == 0, done.stderr
    assert Checkpoint.open(stopped).metadata.steps_done == 4
    resumed = train_with_processes(2, "transformer-xl", "--resume", str(stopped), "--threads", "1")
    assert resumed.returncode == 0, resumed.stderr
    curves = [without_times(read_curve(folder / "curve.csv")) for folder in (whole, stopped)]
    assert curves[0] == curves[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("generator", ""),
        ("transformer-xl", "--memory 20 --hidden 8"),
        ("reformer", "--hash-every 1 --chunk 12"),
    ],
)
def test_two_processes_give_the_curve_of_one_and_resume(
    tmp_path: Path, kind: str, model: str
) -> None:
    """The batch does not divide by processes and micro-batches."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"row, row, row your boat, gently down the stream\n" * 30)
    tiny = (
        "--layers 1 --width 8 --heads 2 --context 12 --batch 5 --accumulate 2 --threads 1 "
        "--steps 6 --eval-every 3 --data"
    )
    options = [*model.split(), *tiny.split(), str(text), "--out"]
    done = train_with_processes(2, kind, *options, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bits/byte") == 1

    alone = [sys.executable, "-m", "transformer_kernels", "train", kind, *options]
    subprocess.run([*alone, str(tmp_path / "one")], capture_output=True, check=True)
    one, two = (read_curve(tmp_path / name / "curve.csv") for name in ("one", "two"))
    assert [row.tokens for row in two] == [row.tokens for row in one]
    losses = [[(row.train_loss, row.val_loss) for row in rows] for rows in (one, two)]
    assert_same_function(*(torch.tensor([[x, y or 0.0] for x, y in rows]) for rows in losses))

    resumed = train_with_processes(2, kind, "--resume", str(tmp_path / "two"), "--threads", "1")
    assert resumed.returncode == 0, resumed.stderr
