"""Every task on small files, and every default preset on its data: it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.support.runtime import default_dtype
from tests.support.tiers import each
from tests.training.run_helpers import assert_same_weights, without_times
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import (
    BertConfig,
    ClassifierConfig,
    GatedDeltaNetConfig,
    GeneratorConfig,
    GPT2Config,
    LinearTransformerConfig,
    LookupConfig,
    ReformerConfig,
    SparseTransformerConfig,
    TransformerXLConfig,
    Translator,
    TranslatorConfig,
)
from transformer_kernels.nn import AttnImplementation, LinearImplementation
from transformer_kernels.training import (
    PRESETS,
    TASKS,
    ByteLanes,
    Dataset,
    Schedule,
    Task,
    TrainConfig,
    Trainer,
    evaluate,
    evaluate_examples,
    load_model,
    resume,
    train,
)
from transformer_kernels.training.data import BEGIN, END, IGNORE_INDEX, PAD, TokenWindows
from transformer_kernels.training.tasks import (
    BertTask,
    ClassifierTask,
    GatedDeltaNetRecallTask,
    GatedDeltaNetTask,
    GeneratorTask,
    GPT2Task,
    LinearCopyTask,
    LinearRecallTask,
    LinearTransformerTask,
    LookupTask,
    ReformerCopyTask,
    ReformerTask,
    SparseTransformerTask,
    TransformerXLTask,
    TranslatorTask,
)

SMALL: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16}
# fmt: off
TINY: tuple[Task, ...] = (
    GeneratorTask(model=GeneratorConfig(**SMALL, context=12)),
    GPT2Task(model=GPT2Config(**SMALL, vocabulary=270, context=12, dropout=0.0)),
    TransformerXLTask(
        model=TransformerXLConfig(**SMALL, head_size=5, context=12, memory=20, dropout=0.0)
    ),
    SparseTransformerTask(
        model=SparseTransformerConfig(**SMALL, context=12, stride=4, summaries=1, subblocks=2)
    ),
    # One chunk of the whole text, which no hash changes: micro-batches have hashes of their own.
    ReformerTask(model=ReformerConfig(**SMALL, context=12, chunk=12, rounds=2)),
    ReformerCopyTask(model=ReformerConfig(**SMALL, vocabulary=11, context=6, chunk=6, rounds=2)),
    LinearTransformerTask(model=LinearTransformerConfig(**SMALL, context=12)),
    LinearCopyTask(model=LinearTransformerConfig(**SMALL, vocabulary=11, context=4)),
    LinearRecallTask(model=LinearTransformerConfig(**SMALL, vocabulary=12, context=4)),
    GatedDeltaNetTask(model=GatedDeltaNetConfig(**SMALL, context=12)),
    GatedDeltaNetRecallTask(
        model=GatedDeltaNetConfig(**SMALL, vocabulary=12, context=4, attention_every=1)
    ),
    ClassifierTask(model=ClassifierConfig(**SMALL, vocabulary=270, context=16)),
    TranslatorTask(model=TranslatorConfig(
        **SMALL, source_vocabulary=280, target_vocabulary=280, hidden=32, context=40, dropout=0.0
    )),
    BertTask(model=BertConfig(**SMALL, vocabulary=280, hidden=32, context=24, dropout=0.0)),
    LookupTask(model=LookupConfig(vocabulary=1, rows=1, width=16)),
)
# fmt: on
TASK_OF = {task.kind: task for task in TINY}
LINEAR = ("linear", "linear-copy", "linear-recall", "gated-deltanet", "gated-deltanet-recall")

every_task = pytest.mark.parametrize("task", TINY, ids=lambda task: task.kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a text, reviews, translations and facts, of a few lines each."""
    folder = tmp_path_factory.mktemp("data")
    lines = [f"the {a} fox {b} over the dog {n}" for a in ("red", "old") for b in ("runs", "hops")
             for n in range(80)]  # fmt: skip
    (folder / "text.txt").write_text("\n".join(lines))
    for part in ("train", "test"):
        for name, word in (("pos", "good"), ("neg", "bad")):
            class_folder = folder / "reviews" / part / name
            class_folder.mkdir(parents=True)
            for n in range(5):
                (class_folder / f"{n}.txt").write_text(f"so {word}, " * (n + 1))
    pairs = folder / "pairs"
    pairs.mkdir()
    for part, numbers in (("train", range(8)), ("val", range(8, 11))):
        (pairs / f"{part}.de").write_text("".join(f"der Hund {n}\n" for n in numbers))
        (pairs / f"{part}.en").write_text("".join(f"the dog {n} barks\n" for n in numbers))
    (folder / "facts.tsv").write_text("the red fox\truns\nthe old dog\tbarks\na bird\tsings\n")
    return folder


def data_of(task: Task, folder: Path) -> Dataset:
    if task.kind.endswith(("-copy", "-recall")):
        return task.data()
    name = {"classifier": "reviews", "translator": "pairs", "lookup": "facts.tsv"}
    return task.data(folder / name.get(task.kind, "text.txt"))


def config_of(task: Task) -> TrainConfig:
    return TrainConfig(
        task=task, steps=8, batch=6, schedule=Schedule(peak=1e-2, warmup=2), eval_every=4,
        eval_batches=2,
    )  # fmt: skip


@pytest.fixture
def float64() -> Iterator[None]:
    with default_dtype(torch.float64):
        yield


def test_every_task_is_tested() -> None:
    assert [task.kind for task in TINY] == list(TASKS)


@each("kind", ["transformer-xl", "reformer", "linear"])
def test_models_of_bytes_need_a_vocabulary_of_all_bytes(kind: str) -> None:
    task = TASK_OF[kind]
    with pytest.raises(ValueError, match="vocabulary must be at least 256, the number of bytes"):
        replace(task, model=replace(task.model, vocabulary=255))


@pytest.mark.quick
@every_task
def test_training_reduces_the_loss(task: Task, folder: Path) -> None:
    config = replace(config_of(task), steps=60, eval_every=60)
    result = train(config, data_of(task, folder))
    assert sum(result.losses[-5:]) < 0.75 * sum(result.losses[:5])
    assert result.score is not None


@pytest.mark.quick
@pytest.mark.usefixtures("float64")
@every_task
def test_every_attention_implementation_gives_the_same_curve(task: Task, folder: Path) -> None:
    data, curves = data_of(task, folder), {}
    for implementation in get_args(
        LinearImplementation if task.kind in LINEAR else AttnImplementation
    ):
        result = train(replace(config_of(task), attn_implementation=implementation), data)
        last = result.rows[-1]
        curves[implementation] = [*result.losses, last.val_loss, last.score]
    for implementation, curve in curves.items():
        assert curve == pytest.approx(curves["eager"], rel=1e-9), implementation


@pytest.mark.usefixtures("float64")
@every_task
def test_accumulation_of_a_padded_batch_gives_the_same_losses(task: Task, folder: Path) -> None:
    """Micro-batches have different numbers of tokens, so a mean of their means would differ."""
    data = data_of(task, folder)
    whole = train(config_of(task), data)
    accumulated = train(replace(config_of(task), accumulate=4, recompute=True), data)
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.quick
@every_task
def test_resume_reloads_the_data_and_continues_exactly(
    task: Task, folder: Path, tmp_path: Path
) -> None:
    data = data_of(task, folder)
    whole = train(config_of(task), data)
    train(config_of(task), data, out=tmp_path, should_stop=lambda: True)
    assert without_times(resume(tmp_path).rows) == without_times(whole.rows)
    trained = load_model(tmp_path, task.kind)
    assert trained.task == whole.config.task == task.fitted(data)
    assert trained.extra == task.extra(data)
    assert_same_weights(trained.model, whole.model)


@every_task
def test_loss_sums_and_counts_add_up_over_examples(task: Task, folder: Path) -> None:
    data = data_of(task, folder)
    trainer = Trainer(config_of(task), data)
    trainer.model.eval()
    batch = data.held_out(5)
    whole, counts = task.losses(trainer.model, batch), task.counts(batch)
    rows = range(len(next(iter(batch.values()))))
    singles = [{name: x[n : n + 1] for name, x in batch.items()} for n in rows]
    for name, total in whole.items():
        parts = [task.losses(trainer.model, single)[name] for single in singles]
        assert_same_function(total, torch.stack(parts).sum())
        assert counts[name] == sum(task.counts(single)[name] for single in singles)
    assert task.tokens(batch) == sum(task.tokens(single) for single in singles)


def test_generator_score_is_a_mean_in_bits_per_byte(folder: Path) -> None:
    """A loss of ln 2 per byte is one bit per byte, whatever the length of the held-out text."""
    task = TASK_OF["generator"]
    data = data_of(task, folder)
    assert task.score(torch.nn.Identity(), data, [], loss=math.log(2)) == pytest.approx(1.0)
    result = train(replace(config_of(task), eval_batches=1), data)
    longer = train(replace(config_of(task), eval_batches=6), data)
    assert result.score == pytest.approx(longer.score, rel=0.1)


def test_gpt2_score_divides_by_the_bytes_per_token(folder: Path) -> None:
    task = TASK_OF["gpt2"]
    data = data_of(task, folder)
    assert isinstance(data, TokenWindows)
    assert data.bytes_per_token > 1.05
    bits = task.score(torch.nn.Identity(), data, [], loss=2.0)
    assert bits == 2.0 / math.log(2) / data.bytes_per_token


def test_padding_is_not_counted_as_a_target(folder: Path) -> None:
    task = TASK_OF["translator"]
    batch = data_of(task, folder).held_out(3)
    targets = batch["target"][:, 1:]
    assert task.counts(batch)["next token"] == int((targets != PAD).sum())
    assert (batch["target"][:, 0] == BEGIN).all()
    assert (batch["target"].gather(1, batch["target_lengths"][:, None] - 1) == END).all()


def test_only_selected_tokens_are_counted(folder: Path) -> None:
    task = TASK_OF["bert"]
    batch = data_of(task, folder).held_out(4)
    selected = batch["labels"] != IGNORE_INDEX
    assert task.counts(batch) == {"masked tokens": int(selected.sum()), "next sentence": 4}
    assert 0 < int(selected.sum()) < task.tokens(batch) / 2


def test_translation_score_counts_only_exact_matches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASK_OF["translator"]
    data = data_of(task, folder)
    batch = data.held_out(3)
    rows = zip(batch["target"].tolist(), batch["target_lengths"].tolist(), strict=True)
    correct = [row[1 : length - 1] for row, length in rows]
    answers = [correct[0], correct[1][:-1], [*correct[2], correct[2][-1]]]
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: answers)
    model = task.build("fused")
    assert task.score(model, data, [batch], loss=0.0) == pytest.approx(1 / 3)


def test_fitted_sets_the_sizes_that_depend_on_the_data(folder: Path) -> None:
    fitted = TASK_OF["classifier"].fitted(data_of(TASK_OF["classifier"], folder))
    assert fitted.model.classes == 2
    table = TASK_OF["lookup"].fitted(data_of(TASK_OF["lookup"], folder))
    assert (table.model.rows, table.model.vocabulary) == (3, 8)


def held_out(kind: str, steps: int) -> tuple[float, float]:
    """Loss and score of the default preset of a kind after `steps` steps."""
    preset = next(iter(PRESETS[kind].values()))
    config = replace(preset, steps=steps, eval_every=steps, eval_batches=2)
    schedule = replace(config.schedule, warmup=steps // 10)
    last = train(replace(config, schedule=schedule), config.task.data()).rows[-1]
    assert last.val_loss is not None
    assert last.score is not None
    print(kind, last)
    return last.val_loss, last.score


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "steps", "most"),
    [
        ("generator", 100, 4.3),  # untrained: 8; byte frequencies alone: 4.8
        ("gpt2", 60, 3.05),  # untrained: 3.6
        ("reformer", 60, 4.4),
        ("linear", 60, 4.0),  # without attention: 4.1
        ("gated-deltanet", 60, 4.0),
        ("sparse", 60, 4.4),
    ],
)
def test_bits_per_byte_of_a_short_training(kind: str, steps: int, most: float) -> None:
    """On the default data. The figures depend slightly on the version of the standard library."""
    assert held_out(kind, steps)[1] < most


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "steps", "most"),
    [
        ("translator", 80, 3.1),  # untrained: 6.9; the minimum with label smoothing: 0.96
        ("bert", 25, 7.7),  # untrained: 8.3, both losses together
    ],
)
def test_loss_of_a_short_training(kind: str, steps: int, most: float) -> None:
    assert held_out(kind, steps)[0] < most


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "steps", "least"),
    [("classifier", 200, 0.2), ("lookup", 60, 0.9)],  # chance: 0.1, and below 0.01
)
def test_accuracy_of_a_short_training(kind: str, steps: int, least: float) -> None:
    assert held_out(kind, steps)[1] > least


@pytest.mark.exhaustive
def test_transformer_xl_predicts_bytes_no_worse_with_a_memory() -> None:
    """The same weights, with memories from none to four times the trained length."""
    preset = PRESETS["transformer-xl"]["demo"]
    model = replace(preset.task.model, layers=2, width=64)
    schedule = replace(preset.schedule, warmup=50)
    task = replace(preset.task, model=model)
    config = replace(preset, task=task, steps=500, eval_every=500, schedule=schedule)
    data = config.task.data()
    trained: Any = train(config, data).model
    assert isinstance(data, ByteLanes)
    bits = {}
    for memory in (0, model.memory, 4 * model.memory):
        trained.config = replace(model, memory=memory)
        bits[memory] = evaluate(config.task, trained, data, lanes=16, segments=100).score
    print("transformer-xl", bits)
    assert bits[0] < 3.6
    assert bits[model.memory] < bits[0]
    assert bits[4 * model.memory] <= bits[0]


@pytest.mark.exhaustive
def test_the_reformer_copies_words_and_more_rounds_help() -> None:
    """The same weights with 1 to 8 hash rounds. Chance: 0.8%."""
    config = replace(PRESETS["reformer-copy"]["demo"], steps=200, eval_every=200)
    data = config.task.data()
    trained: Any = train(config, data).model
    accuracy = {}
    for rounds in (1, 2, 4, 8):
        trained.config = replace(config.task.model, rounds=rounds)
        accuracy[rounds] = evaluate_examples(config.task, trained, data, count=256).score
    print("reformer-copy", accuracy)
    assert accuracy[1] < accuracy[2] - 0.03 < accuracy[4]
    assert accuracy[4] > 0.99
    assert accuracy[8] > 0.99


@pytest.mark.exhaustive
def test_the_linear_transformer_copies_words() -> None:
    """Chance: 0.8%."""
    config = PRESETS["linear-copy"]["demo"]
    data = config.task.data()
    trained = train(config, data).model
    assert evaluate_examples(config.task, trained, data, count=256).score > 0.99
