"""Checkpoints: written as a whole, resumed exactly, and refused where anything in them is wrong."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.support.tiers import each
from tests.training.run_helpers import FINISHED, SHARD, edit_config, edit_tensors, names, put
from transformer_kernels.training import (
    PRESETS,
    Checkpoint,
    CheckpointError,
    Dataset,
    Tokens,
    TrainConfig,
    Trainer,
    TrainingRun,
    load_model,
    resume,
    train,
)
from transformer_kernels.training.checkpoint import Metadata, write_checkpoint

NORM, MOMENT = "model.last_norm.weight", "optimizer.0.exp_avg"
FILES = {"config.json", "curve.csv", "checksums.json", SHARD}


@pytest.fixture(scope="module")
def trained() -> dict[str, bytes]:
    return {}


@pytest.fixture
def folder(trained: dict[str, bytes], config: TrainConfig, data: Dataset, tmp_path: Path) -> Path:
    """A float16 run after three of eight steps. Trained once, written for each test."""
    if not trained:
        stop = iter((False, False, True))
        config = replace(config, precision="float16")
        result = train(config, data, out=tmp_path / "first", should_stop=lambda: next(stop))
        assert result.checkpoint == tmp_path / "first" / "checkpoint-3"
        trained.update((path.name, path.read_bytes()) for path in result.checkpoint.iterdir())
        shutil.rmtree(tmp_path / "first")
    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for name, content in trained.items():
        (checkpoint / name).write_bytes(content)
    (tmp_path / "run" / "curve.csv").write_text("precious")
    return checkpoint


def error_of(folder: Path, *ways: Callable[[], object]) -> str:
    """The error of every way to read the checkpoint, which changes no file; without its path."""
    found = set()
    for way in ways:
        with pytest.raises(CheckpointError) as caught:
            way()
        found.add(str(caught.value))
    (text,) = found
    assert "\n" not in text
    assert text.startswith(f"{folder}: ")
    assert (folder.parent / "curve.csv").read_text() == "precious"
    return text.removeprefix(f"{folder}: ")


def test_files_of_a_checkpoint(folder: Path, data: Dataset) -> None:
    assert names(folder) == FILES
    for path in (folder, folder.parent, str(folder)):
        assert Checkpoint.open(path, ("gpt2", "generator")).folder == folder
    result = resume(folder.parent, data=data)
    assert result.finished
    assert result.checkpoint == folder.with_name("checkpoint-8")
    assert names(folder.parent) == FINISHED


def test_newest_checkpoint_of_a_run_is_read(folder: Path, data: Dataset) -> None:
    """A kill can leave two. One that is named is read whatever there is beside it."""
    older = Path(shutil.copytree(folder, folder.with_name("checkpoint-03")))
    newer = Path(shutil.copytree(folder, folder.with_name("checkpoint-20")))
    assert Checkpoint.open(folder.parent).folder == newer
    assert resume(older, data=data).finished
    assert names(folder.parent) == FINISHED


def test_checkpoint_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"-3: it is a checkpoint of a generator, not of a b"):
        Checkpoint.open(folder, "bert")


def test_path_without_a_checkpoint(tmp_path: Path) -> None:
    """The file of an earlier version is not read, nor is its pickle."""
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "nothing")
    old = tmp_path / "checkpoint.pt"
    torch.save({"format": partial(Path.touch, tmp_path / "touched")}, old)
    for path in (tmp_path, old):
        for read in (load_model, resume):
            with pytest.raises(CheckpointError, match=r"of an earlier version cannot be read") as e:
                read(path)
            assert str(e.value).startswith(f"{path} is not the folder of a checkpoint or a run")
    assert names(tmp_path) == {"checkpoint.pt"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_damaged_file_is_named(folder: Path, data: Dataset, name: str) -> None:
    """Truncated, with a changed bit, or absent."""
    ways = (partial(resume, folder, data=data), partial(load_model, folder))
    path = folder / name
    content = path.read_bytes()
    places = random.Random(0).sample(range(len(content)), 20)
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 7
        for damaged in (bytes(changed), content[:place]):
            path.write_bytes(damaged)
            assert "damaged" in (text := error_of(folder, *ways)) or name == "checksums.json"
            assert name in text or name == "checksums.json"
    path.unlink()
    if name != "checksums.json":
        assert error_of(folder, *ways) == f"it lacks the file {name!r}"


def test_unknown_file_of_tensors_is_refused(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder / "model.safetensors")
    (folder / ".DS_Store").touch()
    text = error_of(folder, partial(load_model, folder))
    assert text == "it has the unknown file 'model.safetensors'"


def change(path: str, value: Any) -> Callable[[Path], None]:
    """An edit of config.json at a path of keys."""

    def edit(values: Any) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            values = values[parent]
        values[key] = value

    return lambda folder: edit_config(folder, edit)


def content(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: put(folder, name, content)


def tensors(
    changes: dict[str, Tensor | None], offsets: dict[str, Any] | None = None
) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, changes, offsets)


MODEL_EDITS = [
    (lambda folder: (folder / "checksums.json").write_text("[]"), "checksums.json must have the f"),
    (content("config.json", b"\xff{"), "can't decode byte"),
    (content("config.json", b"[" * 100_000), "it is damaged: 'maximum recu"),
    (content("config.json", b"[3]"), "config.json must have the format 'transformer_kernels"),
    (change("format", "transformer_kernels checkpoint, version 9"), "version 3', got 'trans"),
    (change("moon", 3), "config.json has unknown fields: 'moon'"),
    (change("config", None), "config.json lacks the dict 'config'"),
    (change("extra", [1]), "config.json lacks the dict 'extra'"),
    (change("extra.tokens", ""), "extra must have the keys [], got ["),
    (change("data", 3), "config.json.data must be of type str, got 3"),
    (change("source", "a\0b"), "config.json.source must be text"),
    (change("data", "\ud800"), "config.json.data must be text"),
    (change("steps_done", -1), "steps_done must be between 0 and 8, got -1"),
    (change("steps_done", 9), "steps_done must be between 0 and 8, got 9"),
    (change("steps_done", True), "config.json.steps_done must be of type int, got True"),
    (change("updates", 4), "updates do not match steps_done, 3, got 4"),
    (change("config.precision", "float32"), "do"),
    (change("scaler", None), "scaler does not match float16, got None"),
    (change("scaler", [float("nan"), 1]), "scaler does not match float16, got (nan, 1)"),
    (change("scaler", [1.0]), "config.json.scaler must have 2 numbers, got [1.0]"),
    (change("context_parallel", 2), "context_parallel must divide the number of processes, 1"),
    (change("context_parallel", 0), "context_parallel must divide the number of processes, 1"),
    (change("config.moon", 3), "config has unknown fields: 'moon'"),
    (change("config.betas", [0.9, None]), "config.betas must be of type float, got None"),
    (change("config.betas", [0.9, 1.0]), "betas must be at least 0 and below 1, got 1.0"),
    (change("config.recompute", "yes"), "config.recompute must be of type bool, got 'yes'"),
    (change("config.steps", 10**30), "config.steps must be of type int, got 1000"),
    (change("config.schedule.warmup", 2.5), "config.schedule.warmup must be of type int"),
    (change("config.task.kind", "moon"), "config.task.kind must be one of generator, gpt2"),
    (change("config.task.model.layers", 10**12), "tensors, but the config 1000000000000 layers"),
    (change("config.task.model.width", 10**8), "must have shape (256, 100000000)"),
    (change("config.task.model.width", 10**12), "it is damaged: 'Storage size"),
    (content(SHARD, b""), "it is damaged: "),
    (content(SHARD, b"\xff" * 100), "it is damaged: "),
    (content(SHARD, b"\x80\x04K\x01."), "it is damaged: "),
    (content(SHARD, save({NORM: torch.zeros(16)})), "it has 1 tensors, but the config 2"),
    (tensors({NORM: None}), f"it lacks the tensor {NORM}"),
    (tensors({"model.moon": torch.zeros(1)}), "it has the unknown tensor 'model.moon'"),
    (
        tensors({NORM: torch.zeros(15)}),
        f"{NORM} must have shape (16,) and dtype torch.float32, got",
    ),
    (tensors({NORM: torch.zeros(16).double()}), "dtype torch.float32, got (16,) and torch.float64"),
    (tensors({NORM: torch.full((16,), torch.nan)}), f"{NORM} must be finite, got NaN or infinity"),
    (tensors({NORM: torch.zeros(8)}, {NORM: [8]}), f"{NORM} must be finite, got NaN or infinity"),
    (tensors({NORM: torch.zeros(8)}, {NORM: [10**15]}), "its tensors are larger than its files"),
    (tensors({NORM: torch.zeros(16)}, {NORM: [-8]}), f"{NORM} must have shape (16,)"),
    (tensors({NORM: torch.zeros(16)}, {NORM: "x"}), "it is damaged: "),
]
RUN_EDITS = [
    (content("curve.csv", b"step\n"), "curve.csv is not a curve: "),
    (content("curve.csv", b"\xff"), "curve.csv is not a curve: "),
    (tensors({"moon": torch.zeros(1)}), "it has the unknown tensor 'moon'"),
    (tensors({MOMENT: torch.zeros(5)}), f"{MOMENT} must have shape (256, 16)"),
    (tensors({MOMENT: torch.full((256, 16), torch.inf)}), f"{MOMENT} must be finite"),
    (tensors({MOMENT: None}), f"it lacks the tensor {MOMENT}"),
    (change("updates", 0), "it has the unknown tensor 'optimizer."),
    (change("processes", 10**12), "random.cpu must have shape (1000000000000, 5056)"),
    (tensors({"batches": None}), "it lacks the tensor batches"),
    (tensors({"batches": torch.zeros(5056, dtype=torch.uint8)}), "a random state is not one of"),
    (
        tensors({"random.cpu": torch.zeros(1, 5056, dtype=torch.uint8)}),
        "a random state is not one of",
    ),
]


@pytest.mark.parametrize(("edit", "message"), MODEL_EDITS)
def test_invalid_entry_is_named(
    folder: Path, data: Dataset, edit: Callable[[Path], None], message: str
) -> None:
    """By a program that writes the right checksums."""
    edit(folder)
    ways = (partial(resume, folder, data=data), partial(load_model, folder))
    assert message in error_of(folder, *ways)


@pytest.mark.parametrize(("edit", "message"), RUN_EDITS)
def test_invalid_entry_of_a_run_is_named(
    folder: Path, data: Dataset, edit: Callable[[Path], None], message: str
) -> None:
    """It does not matter to a model."""
    edit(folder)
    assert message in error_of(folder, partial(resume, folder, data=data))
    assert not load_model(folder).model.training


@pytest.mark.parametrize("key", ["step", "train_loss", "seconds"])
def test_invalid_curve_is_named(folder: Path, data: Dataset, key: str) -> None:
    header, *rows = (folder / "curve.csv").read_text().splitlines()
    cells = rows[1].split(",")
    cells[header.split(",").index(key)] = "0" if key != "train_loss" else "nan"
    put(folder, "curve.csv", "\n".join([header, rows[0], ",".join(cells), rows[2]]).encode())
    text = error_of(folder, partial(resume, folder, data=data))
    assert text.startswith("curve.csv must " + ("count" if key == "step" else "have finite"))


def test_every_absent_entry_is_named(folder: Path, data: Dataset) -> None:
    original = json.loads((folder / "config.json").read_text())
    for path in ((), ("config",), ("config", "task", "model")):
        part = original
        for key in path:
            part = part[key]
        for key in list(part):
            value = part.pop(key)
            put(folder, "config.json", json.dumps(original).encode())
            assert key in error_of(folder, partial(resume, folder, data=data))
            part[key] = value


def test_context_beyond_any_memory_is_refused(tmp_path: Path) -> None:
    """A translator's sinusoids are not in the file."""
    preset = PRESETS["translator"]["demo"]
    metadata = Metadata(
        config=preset, data="texts", source=None, digest="",
        extra={"tokens": Tokens(special=True).to_json()},
        steps_done=0, updates=0, scaler=None, processes=1, context_parallel=1,
    )  # fmt: skip
    weights = preset.task.build("eager").state_dict(prefix="model.")
    folder = write_checkpoint(tmp_path, metadata, weights, ())
    assert load_model(folder, "translator").task == preset.task
    change("config.task.model.context", 10**15)(folder)
    with pytest.raises(CheckpointError, match="checkpoint-0: the config is too large"):
        load_model(folder)


def test_only_float16_may_have_no_moments(folder: Path, data: Dataset) -> None:
    """It may have skipped every update."""
    change("updates", 0)(folder)
    found = Checkpoint.open(folder).tensors
    tensors({name: None for name in found if name.startswith("optimizer.")})(folder)
    assert resume(folder, data=data).finished


@each(
    ("kind", "extra"),
    [
        ("gpt2", {}),
        ("gpt2", {"tokens": None}),
        ("gpt2", {"tokens": Tokens(special=True).to_json()}),
        ("bert", {"tokens": Tokens().to_json()}),
        ("translator", {"tokens": "[" * 100_000}),
        # each merge doubles the longest token
        ("gpt2", {"tokens": json.dumps({"merges": [[255 + n] * 2 for n in range(1, 60)]})}),
        ("classifier", {"tokens": Tokens().to_json()}),
        ("classifier", {"tokens": Tokens().to_json(), "classes": ["a"] * 9}),
        ("classifier", {"tokens": Tokens().to_json(), "classes": ["a", "\udcff"]}),
        ("lookup", {"facts": [["key"]]}),
        ("lookup", {"facts": [["key", "value"]]}),
    ],
)
def test_extra_data_that_does_not_suit_the_model_is_refused(
    kind: str, extra: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"extra|to_json"):
        PRESETS[kind]["demo"].task.check_extra(extra)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Function that sets the largest file size of this process, in bytes, for one test."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_limit_of_file_sizes_leaves_the_old_checkpoint(
    folder: Path, data: Dataset, largest_file: Callable[[int], None]
) -> None:
    run = TrainingRun.resume(folder, data=data)
    largest_file(1 << 14)
    with pytest.raises(OSError, match="File too large") as caught:
        run.train()
    assert caught.value.filename == str(folder.with_name("checkpoint-4"))
    assert names(folder.parent) == {".lock", "checkpoint-3", "curve.csv"}
    assert Checkpoint.open(folder.parent).metadata.steps_done == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_full_disk_leaves_the_old_checkpoint(
    folder: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, mkdir = TrainingRun.resume(folder, data=data), Path.mkdir

    def with_a_full_disk(path: Path, *args: Any, **options: Any) -> None:
        new = not path.exists()
        mkdir(path, *args, **options)
        if new and path.name == ".checkpoint-4.tmp":
            (path / name).symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", with_a_full_disk)
    with pytest.raises(OSError, match="No space left on device") as caught:
        run.train()
    assert caught.value.filename == str(folder.with_name("checkpoint-4"))
    assert names(folder.parent) == {".lock", "checkpoint-3", "curve.csv"}


@pytest.mark.parametrize(
    ("at", "left"), [(".checkpoint-4.tmp", "checkpoint-3"), ("checkpoint-3", "checkpoint-4")]
)
def test_kill_leaves_a_whole_checkpoint_and_a_free_folder(
    folder: Path, data: Dataset, at: str, left: str
) -> None:
    """Before the new checkpoint has its name, and after that."""
    process = os.fork()
    if process == 0:
        try:
            train_until_killed(folder, data, at)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert Checkpoint.open(folder.parent).folder == folder.with_name(left)
    assert resume(folder.parent, data=data).finished
    assert names(folder.parent) == FINISHED


def train_until_killed(folder: Path, data: Dataset, at: str) -> None:
    """Resumes a run, and kills this process where it renames the folder `at`."""
    rename = Path.rename

    def kill(path: Path, target: Path) -> Path:
        if path.name == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        patch.setattr(Path, "rename", kill)
        TrainingRun.resume(folder, data=data).train()


def test_folders_of_others_are_neither_removed_nor_written(folder: Path, data: Dataset) -> None:
    run = TrainingRun.resume(folder, data=data)
    for name in ("checkpoint-4", "checkpoint-best", "checkpoint-100"):
        folder.with_name(name).mkdir()
        (folder.with_name(name) / "config.json").touch()
    with pytest.raises(OSError, match="Directory not empty") as caught:
        run.train()
    assert caught.value.filename == str(folder.with_name("checkpoint-4"))
    for name in ("checkpoint-4", "checkpoint-best", "checkpoint-100"):
        assert names(folder.with_name(name)) == {"config.json"}
    assert Checkpoint.open(folder.parent).folder == folder


def test_unknown_grid_begins_new_random_numbers(
    folder: Path, config: TrainConfig, data: Dataset
) -> None:
    """The dropout of a rank is a function of seed, rank and step."""
    change("processes", 2)(folder)
    tensors({"random.cpu": torch.get_rng_state().repeat(2, 1)})(folder)
    checkpoint = Checkpoint.open(folder)
    states = []
    for _ in range(2):
        Trainer(replace(config, precision="float16"), data).restore(checkpoint)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    saved = checkpoint.read({"random.cpu": states[0].expand(2, -1)}, "random.")["random.cpu"]
    assert not torch.equal(states[0], saved[0])
