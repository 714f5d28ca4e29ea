"""The default runs, cut short: on the data that they carry, models reach what is stated here.

A minute on two cores. The figures depend on the version of the standard library, by little.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_kernels.training import PRESETS, train

pytestmark = pytest.mark.exhaustive


def run(kind: str, steps: int) -> tuple[float, float]:
    """The held-out loss and score of the kind's default, of so many steps."""
    preset = next(iter(PRESETS[kind].values()))
    config = replace(preset, steps=steps, eval_every=steps, eval_batches=2)
    schedule = replace(config.schedule, warmup=steps // 10)
    last = train(replace(config, schedule=schedule), config.task.data()).rows[-1]
    assert last.val_loss is not None
    assert last.score is not None
    print(kind, last)
    return last.val_loss, last.score


def test_the_generator_predicts_bytes() -> None:
    """8 bits without having learned anything, 4.8 by their frequencies."""
    _, bits = run("generator", 100)
    assert bits < 4.3


def test_gpt2_predicts_tokens() -> None:
    """3.6 bits a byte without having learned anything."""
    _, bits = run("gpt2", 60)
    assert bits < 3.05


def test_the_classifier_beats_chance() -> None:
    """One in ten."""
    _, accuracy = run("classifier", 200)
    assert accuracy > 0.2


def test_the_translator_learns_to_spell() -> None:
    """6.9 nats without having learned anything, 0.96 at best, for targets are smoothed."""
    loss, _ = run("translator", 80)
    assert loss < 3.1


def test_bert_fills_in_tokens() -> None:
    """8.3 nats, of both losses, without having learned anything."""
    loss, _ = run("bert", 25)
    assert loss < 7.7


def test_the_table_finds_its_rows() -> None:
    _, accuracy = run("lookup", 60)
    assert accuracy > 0.9
