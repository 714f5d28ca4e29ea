"""The training-step benchmark."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks.runner.training import StepRow, append, steps_of, table
from transformer_kernels.bench import Budget, Provenance
from transformer_kernels.models import GeneratorConfig
from transformer_kernels.training import PRESETS, TrainConfig, Trainer
from transformer_kernels.training.trainer import Step

TINY = replace(
    PRESETS["generator"]["demo"],
    task=replace(
        PRESETS["generator"]["demo"].task,
        model=GeneratorConfig(layers=1, width=16, heads=2, context=32),
    ),
    batch=2,
)
BUDGET = Budget(seconds=0.0, fewest=2, most=2)


def measured(config: TrainConfig = TINY) -> tuple[list[StepRow], dict[str, str]]:
    return steps_of(config, "generator demo", Provenance.now(), BUDGET)


@pytest.mark.quick
def test_every_implementation_has_a_row(tmp_path: Path) -> None:
    rows, skipped = measured()
    assert skipped == {}
    assert [row.attention for row in rows] == ["naive", "fused", "torch"]
    for row in rows:
        assert (row.context, row.batch, row.precision) == (32, 2, "float32")
        assert row.tokens_per_s == pytest.approx(64 / row.median_ms * 1e3)
    for _ in range(2):
        append(tmp_path / "new" / "training.csv", rows)
    with (tmp_path / "new" / "training.csv").open(newline="") as file:
        read = list(csv.reader(file))
    assert read[0] == [field.name for field in fields(StepRow)]
    assert [line[read[0].index("attention")] for line in read[1:]] == [
        "naive",
        "fused",
        "torch",
    ] * 2
    lines = table(rows)
    assert lines[2].startswith("| 32 | 2 | ")
    assert {line.count("|") for line in lines} == {6}


def test_a_different_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def wrong(trainer: Trainer) -> Step:
        done = step(trainer)
        is_fused = trainer.config.attn_implementation == "fused"
        return done._replace(loss=1.02 * done.loss) if is_fused else done

    monkeypatch.setattr(Trainer, "step", wrong)
    with pytest.raises(AssertionError, match=r"fused: loss .*, expected"):
        measured()


def test_an_implementation_out_of_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def out_of_memory(trainer: Trainer) -> Step:
        if trainer.config.attn_implementation == "eager":
            raise torch.cuda.OutOfMemoryError("no 7 GiB more\nthis line is longer")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", out_of_memory)
    rows, skipped = measured()
    assert skipped == {"eager": "no 7 GiB more"}
    assert [row.attention for row in rows] == ["fused", "torch"]
    assert "| -, " in table(rows)[2]
