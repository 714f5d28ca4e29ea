"""What the models are trained for: every task learns, by every path alike, from small files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from transformer_kernels.models import (
    BertConfig,
    ClassifierConfig,
    GeneratorConfig,
    GPT2Config,
    LookupConfig,
    Translator,
    TranslatorConfig,
)
from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import (
    TASKS,
    CurveRow,
    Dataset,
    Schedule,
    Task,
    TrainConfig,
    Trainer,
    load_model,
    resume,
    train,
)
from transformer_kernels.training.data import BEGIN, END, NOT_ASKED, PAD, TokenWindows
from transformer_kernels.training.tasks import (
    BertTask,
    ClassifierTask,
    GeneratorTask,
    GPT2Task,
    LookupTask,
    TranslatorTask,
    task_from_dict,
)

SMALL: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16}
TINY: tuple[Task, ...] = (
    GeneratorTask(model=GeneratorConfig(**SMALL, context=12)),
    GPT2Task(model=GPT2Config(**SMALL, vocabulary=270, context=12, dropout=0.0)),
    ClassifierTask(model=ClassifierConfig(**SMALL, vocabulary=270, context=16)),
    TranslatorTask(
        model=TranslatorConfig(
            **SMALL,
            source_vocabulary=280,
            target_vocabulary=280,
            hidden=32,
            context=40,
            dropout=0.0,
        )
    ),
    BertTask(model=BertConfig(**SMALL, vocabulary=280, hidden=32, context=24, dropout=0.0)),
    LookupTask(model=LookupConfig(vocabulary=1, rows=1, width=16)),
)
PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)

every_task = pytest.mark.parametrize("task", TINY, ids=lambda task: task.kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, reviews, translations and facts, all of them a few lines."""
    folder = tmp_path_factory.mktemp("data")
    lines = [f"the {a} fox {b} over the dog {n}" for a in ("red", "old") for b in ("runs", "hops")
             for n in range(80)]  # fmt: skip
    (folder / "text.txt").write_text("\n".join(lines))
    for part in ("train", "test"):
        for name, word in (("pos", "good"), ("neg", "bad")):
            place = folder / "reviews" / part / name
            place.mkdir(parents=True)
            for n in range(5):
                (place / f"{n}.txt").write_text(f"so {word}, " * (n + 1))
    pairs = folder / "pairs"
    pairs.mkdir()
    for part, numbers in (("train", range(8)), ("val", range(8, 11))):
        (pairs / f"{part}.de").write_text("".join(f"der Hund {n}\n" for n in numbers))
        (pairs / f"{part}.en").write_text("".join(f"the dog {n} barks\n" for n in numbers))
    (folder / "facts.tsv").write_text("the red fox\truns\nthe old dog\tbarks\na bird\tsings\n")
    return folder


def data_of(task: Task, folder: Path) -> Dataset:
    name = {"classifier": "reviews", "translator": "pairs", "lookup": "facts.tsv"}
    return task.data(folder / name.get(task.kind, "text.txt"))


def config_of(task: Task) -> TrainConfig:
    return TrainConfig(
        task=task, steps=8, batch=6, schedule=Schedule(peak=1e-2, warmup=2), eval_every=4,
        eval_batches=2,
    )  # fmt: skip


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_kind_is_tested() -> None:
    assert [task.kind for task in TINY] == list(TASKS)


@every_task
def test_a_task_goes_through_plain_values(task: Task) -> None:
    assert task_from_dict(task.to_dict()) == task


@every_task
def test_it_learns_what_it_is_shown(task: Task, folder: Path) -> None:
    config = replace(config_of(task), steps=60, eval_every=60)
    result = train(config, data_of(task, folder))
    assert sum(result.losses[-5:]) < 0.75 * sum(result.losses[:5])
    assert result.score is not None


@pytest.mark.usefixtures("float64")
@every_task
def test_every_path_gives_the_same_curve(task: Task, folder: Path) -> None:
    data, curves = data_of(task, folder), {}
    for path in PATHS:
        result = train(replace(config_of(task), attn_implementation=path), data)
        last = result.rows[-1]
        curves[path] = [*result.losses, last.val_loss, last.score]
    assert curves["fused"] == pytest.approx(curves["eager"], rel=1e-9)
    assert curves["sdpa"] == pytest.approx(curves["eager"], rel=1e-9)


@pytest.mark.usefixtures("float64")
@every_task
def test_parts_of_a_padded_batch_add_up_to_the_whole(task: Task, folder: Path) -> None:
    """Means of parts would not: parts have different numbers of tokens."""
    data = data_of(task, folder)
    whole = train(config_of(task), data)
    cut = train(replace(config_of(task), accumulate=4, recompute=True), data)
    assert cut.losses == pytest.approx(whole.losses, rel=1e-9)


def without_times(rows: list[CurveRow]) -> list[CurveRow]:
    return [row._replace(seconds=0.0, tokens_per_s=0.0) for row in rows]


@every_task
def test_a_stopped_run_reads_its_data_again_and_resumes_exactly(
    task: Task, folder: Path, tmp_path: Path
) -> None:
    data = data_of(task, folder)
    whole = train(config_of(task), data)
    train(config_of(task), data, out=tmp_path, should_stop=lambda: True)
    assert without_times(resume(tmp_path / "checkpoint.pt").rows) == without_times(whole.rows)
    trained = load_model(tmp_path / "checkpoint.pt", task.kind)
    assert trained.task == whole.config.task == task.fitted(data)
    assert trained.extra == task.extra(data)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(trained.model.state_dict()[name], weight), name


@every_task
def test_the_loss_is_that_of_each_example_weighted_by_its_terms(task: Task, folder: Path) -> None:
    data = data_of(task, folder)
    trainer = Trainer(config_of(task), data)
    trainer.model.eval()
    batch = data.held_out(5)
    whole, counts = task.losses(trainer.model, batch), task.counts(batch)
    rows = range(len(next(iter(batch.values()))))
    singles = [{name: x[n : n + 1] for name, x in batch.items()} for n in rows]
    for name, total in whole.items():
        parts = [task.losses(trainer.model, single)[name] for single in singles]
        torch.testing.assert_close(total, torch.stack(parts).sum())
        assert counts[name] == sum(task.counts(single)[name] for single in singles)
    assert task.tokens(batch) == sum(task.tokens(single) for single in singles)


def test_former_bits_per_byte_are_a_mean_and_not_the_sum(folder: Path) -> None:
    """However long the held-out text is: a loss of ln 2 a byte is a bit a byte."""
    task = TINY[0]
    data = data_of(task, folder)
    assert task.score(torch.nn.Identity(), data, [], loss=math.log(2)) == pytest.approx(1.0)
    result = train(replace(config_of(task), eval_batches=1), data)
    longer = train(replace(config_of(task), eval_batches=6), data)
    assert result.score == pytest.approx(longer.score, rel=0.1)


def test_bits_per_byte_count_the_bytes_of_tokens(folder: Path) -> None:
    task = TINY[1]
    data = data_of(task, folder)
    assert isinstance(data, TokenWindows)
    assert data.bytes_per_token > 1.05
    bits = task.score(torch.nn.Identity(), data, [], loss=2.0)
    assert bits == 2.0 / math.log(2) / data.bytes_per_token


def test_padding_is_never_a_target(folder: Path) -> None:
    task = TINY[3]
    batch = data_of(task, folder).held_out(3)
    targets = batch["target"][:, 1:]
    assert task.counts(batch)["next token"] == int((targets != PAD).sum())
    assert (batch["target"][:, 0] == BEGIN).all()
    assert (batch["target"].gather(1, batch["target_lengths"][:, None] - 1) == END).all()


def test_only_masked_tokens_are_asked_for(folder: Path) -> None:
    task = TINY[4]
    batch = data_of(task, folder).held_out(4)
    asked = batch["labels"] != NOT_ASKED
    assert task.counts(batch) == {"masked tokens": int(asked.sum()), "next sentence": 4}
    assert 0 < int(asked.sum()) < task.tokens(batch) / 2


def test_a_translation_is_right_only_as_a_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TINY[3]
    data = data_of(task, folder)
    batch = data.held_out(3)
    rows = zip(batch["target"].tolist(), batch["target_lengths"].tolist(), strict=True)
    right = [row[1 : length - 1] for row, length in rows]
    answers = [right[0], right[1][:-1], [*right[2], right[2][-1]]]
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: answers)
    model = task.build("fused")
    assert task.score(model, data, [batch], loss=0.0) == pytest.approx(1 / 3)


def test_the_data_decides_classes_rows_and_words(folder: Path) -> None:
    fitted = TINY[2].fitted(data_of(TINY[2], folder))
    assert fitted.model.classes == 2
    table = TINY[5].fitted(data_of(TINY[5], folder))
    assert (table.model.rows, table.model.vocabulary) == (3, 8)
