"""Tests that each default preset learns: short runs on the default data reach a threshold.

Takes a minute on two cores. The figures depend slightly on the version of the standard library.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_kernels.models import Reformer, TransformerXL
from transformer_kernels.training import PRESETS, ByteLanes, evaluate, evaluate_examples, train

pytestmark = pytest.mark.exhaustive


def run(kind: str, steps: int) -> tuple[float, float]:
    """Held-out loss and score of the default preset of a kind after `steps` steps."""
    preset = next(iter(PRESETS[kind].values()))
    config = replace(preset, steps=steps, eval_every=steps, eval_batches=2)
    schedule = replace(config.schedule, warmup=steps // 10)
    last = train(replace(config, schedule=schedule), config.task.data()).rows[-1]
    assert last.val_loss is not None
    assert last.score is not None
    print(kind, last)
    return last.val_loss, last.score


def test_the_generator_predicts_bytes() -> None:
    """Untrained: 8 bits per byte. Byte frequencies alone: 4.8."""
    _, bits = run("generator", 100)
    assert bits < 4.3


def test_gpt2_predicts_tokens() -> None:
    """Untrained: 3.6 bits per byte."""
    _, bits = run("gpt2", 60)
    assert bits < 3.05


def test_transformer_xl_predicts_bytes_no_worse_with_a_memory() -> None:
    """The same weights, with memories from none to four times the trained length.

    Untrained: 8 bits per byte. Byte frequencies alone: 4.8.
    """
    preset = PRESETS["transformer-xl"]["demo"]
    model = replace(preset.task.model, layers=2, width=64)
    config = replace(
        preset,
        task=replace(preset.task, model=model),
        steps=500,
        eval_every=500,
        schedule=replace(preset.schedule, warmup=50),
    )
    data = config.task.data()
    trained = train(config, data).model
    assert isinstance(trained, TransformerXL)
    assert isinstance(data, ByteLanes)
    bits = {}
    for memory in (0, model.memory, 4 * model.memory):
        trained.config = replace(model, memory=memory)
        bits[memory] = evaluate(config.task, trained, data, lanes=16, segments=100).score
    print("transformer-xl", bits)
    assert bits[0] < 3.6
    assert bits[model.memory] < bits[0]
    assert bits[4 * model.memory] <= bits[0]


def test_the_reformer_copies_words_and_more_rounds_help() -> None:
    """The same weights with 1 to 8 hash rounds. Chance: 0.8%."""
    preset = PRESETS["reformer-copy"]["demo"]
    config = replace(preset, steps=200, eval_every=200)
    data = config.task.data()
    trained = train(config, data).model
    assert isinstance(trained, Reformer)
    accuracy = {}
    for rounds in (1, 2, 4, 8):
        trained.config = replace(config.task.model, rounds=rounds)
        accuracy[rounds] = evaluate_examples(config.task, trained, data, count=256).score
    print("reformer-copy", accuracy)
    assert accuracy[1] < accuracy[2] - 0.03 < accuracy[4]
    assert accuracy[4] > 0.99
    assert accuracy[8] > 0.99


def test_the_reformer_predicts_bytes() -> None:
    """Untrained: 8 bits per byte. Byte frequencies alone: 4.8."""
    _, bits = run("reformer", 60)
    assert bits < 4.4


def test_the_linear_transformer_copies_words() -> None:
    """Chance: 0.8%."""
    config = PRESETS["linear-copy"]["demo"]
    data = config.task.data()
    trained = train(config, data).model
    accuracy = evaluate_examples(config.task, trained, data, count=256).score
    print("linear-copy", accuracy)
    assert accuracy > 0.99


def test_the_linear_transformer_predicts_bytes() -> None:
    """Untrained: 8 bits per byte. Without attention: 4.1."""
    _, bits = run("linear", 60)
    assert bits < 4.0


def test_the_sparse_transformer_predicts_bytes() -> None:
    """Untrained: 8 bits per byte. Byte frequencies alone: 4.8."""
    _, bits = run("sparse", 60)
    assert bits < 4.4


def test_the_classifier_beats_chance() -> None:
    """Chance: 0.1."""
    _, accuracy = run("classifier", 200)
    assert accuracy > 0.2


def test_the_translator_learns_to_spell() -> None:
    """Untrained: 6.9 nats. Minimum with label smoothing: 0.96."""
    loss, _ = run("translator", 80)
    assert loss < 3.1


def test_bert_predicts_masked_tokens() -> None:
    """Untrained: 8.3 nats, both losses together."""
    loss, _ = run("bert", 25)
    assert loss < 7.7


def test_the_lookup_finds_its_rows() -> None:
    _, accuracy = run("lookup", 60)
    assert accuracy > 0.9
