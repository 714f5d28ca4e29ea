"""Sharded checkpoints of a group of one process: crashes, damage and edited files."""

from __future__ import annotations

import json
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from transformer_kernels.training.shard_files import ShardFiles

from tests.training.divided import GPT2, data_of, start_or_resume, train_until
from transformer_kernels.training import (
    CheckpointError,
    TrainingRun,
    checkpoint,
    load_checkpoint,
    load_model,
    resume,
    train,
)
from transformer_kernels.training.distributed import end_process_group, grid_of_processes

FILE = "shard-00001-model-00001-of-00001.safetensors"
CONFIG = replace(GPT2, eval_every=2)
WEIGHT, MOMENT = "model.last_norm.weight", "optimizer.state.0.exp_avg"


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_until(start_or_resume(folder, CONFIG, sharded=True), 3)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Folder of a run of 8 steps, stopped after 3."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_sharded_checkpoint_has_the_entries_of_one_file(folder: Path, tmp_path: Path) -> None:
    train(CONFIG, data_of(CONFIG), out=tmp_path / "plain", should_stop=lambda: True)
    plain = load_checkpoint(tmp_path / "plain" / "checkpoint.pt")
    state = load_checkpoint(folder / "checkpoint.pt")
    assert state.keys() == plain.keys()
    assert state["model"].keys() == plain["model"].keys()
    assert state["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
    assert all(x.device.type == "cpu" for x in state["model"].values())
    assert names(folder) == ["checkpoint-3", "checkpoint.pt", "curve.csv"]
    assert (folder / "checkpoint.pt").stat().st_size < (
        folder / "checkpoint-3" / FILE
    ).stat().st_size


def test_run_resumes_sharded_or_not_with_the_same_losses(folder: Path, tmp_path: Path) -> None:
    expected = train(CONFIG, data_of(CONFIG)).losses
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert resume(other / "checkpoint.pt", data=data_of(CONFIG)).losses == expected
    assert names(other) == ["checkpoint.pt", "curve.csv"]
    run = start_or_resume(folder, CONFIG, sharded=True)
    assert run.train().losses == expected
    assert names(folder) == ["checkpoint-8", "checkpoint.pt", "curve.csv"]


def test_crash_before_the_file_is_replaced_leaves_the_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run = start_or_resume(folder, CONFIG, sharded=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", crash)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert names(folder) == ["checkpoint-3", "checkpoint-4", "checkpoint.pt", "curve.csv"]
    assert load_checkpoint(folder / "checkpoint.pt")["steps_done"] == 3
    run = start_or_resume(folder, CONFIG, sharded=True)
    train_until(run, 4)  # writes the same folder again
    assert names(folder) == ["checkpoint-4", "checkpoint.pt", "curve.csv"]
    assert load_checkpoint(folder / "checkpoint.pt")["steps_done"] == 4


def test_limit_of_file_sizes_leaves_the_old_checkpoint(folder: Path) -> None:
    run = start_or_resume(folder, CONFIG, sharded=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(folder / "checkpoint-4")
    assert load_checkpoint(folder / "checkpoint.pt")["steps_done"] == 3


def test_folders_of_others_are_neither_removed_nor_written(folder: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-best"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").touch()
    run = start_or_resume(folder, CONFIG, sharded=True)
    with pytest.raises(FileExistsError) as caught:
        run.train()
    assert caught.value.filename == str(folder / "checkpoint-4")
    for name in ("checkpoint-4", "checkpoint-best"):
        assert names(folder / name) == ["model.safetensors"]
    (tmp_path / "new" / "checkpoint-500").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"already holds a run \(checkpoint-500\)"):
        start_or_resume(tmp_path / "new", CONFIG, sharded=True)


def errors_of(folder: Path) -> str:
    """The error of every way to read the checkpoint, without its path."""
    path = folder / "checkpoint.pt"
    curve = (folder / "curve.csv").read_bytes()
    ways: tuple[Callable[[], object], ...] = (
        lambda: TrainingRun.resume(
            path, data=data_of(CONFIG), distributed=grid_of_processes(sharded=True)
        ),
        lambda: resume(path, data=data_of(CONFIG)),
        lambda: load_model(path),
    )
    found = []
    for way in ways:
        with pytest.raises(CheckpointError) as caught:
            way()
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")
        found.append(str(caught.value).removeprefix(f"{path}: "))
    assert (folder / "curve.csv").read_bytes() == curve
    return " | ".join(found)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "shards must have the keys folder and files, got None"),
        ({"folder": "checkpoint-3"}, "shards must have the keys folder and files"),
        ({"folder": "../run/checkpoint-3"}, "shards.folder must be checkpoint-<step>, got '../"),
        ({"folder": "checkpoint-3/"}, "shards.folder must be checkpoint-<step>"),
        ({"folder": "checkpoint-\u0663"}, "shards.folder must be checkpoint-<step>"),
        ({"folder": 3}, "shards.folder must be checkpoint-<step>, got 3"),
        ({"folder": "checkpoint-9"}, f"checkpoint-9 lacks the file {FILE}"),
        ({"files": {}}, "shards.files must be a dict of files, got {}"),
        ({"files": {f"../{FILE}": (1, 2)}}, "shards.files has the invalid name '../shard"),
        ({"files": {FILE: (1, None)}}, "must be a size and a checksum, got (1, None)"),
        ({"files": {FILE: (1, 2)}}, f"checkpoint-3/{FILE} is damaged"),
    ],
)
def test_invalid_entry_is_named(folder: Path, value: Any, message: str) -> None:
    def change(state: dict[str, Any]) -> None:
        state["shards"] = value if value is None or len(value) == 0 else state["shards"] | value
        if value == {"folder": "checkpoint-3"}:
            del state["shards"]["files"]

    edit(folder, change)
    for error in errors_of(folder).split(" | "):
        assert message in error


@pytest.mark.parametrize("damage", ["truncated", "bit", "absent", "another", "folder"])
def test_damaged_folder_is_named(folder: Path, damage: str) -> None:
    file = folder / "checkpoint-3" / FILE
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-5])
    elif damage == "bit":
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "absent":
        file.unlink()
    elif damage == "another":
        (file.parent / "model.safetensors").write_bytes(content)
    else:
        shutil.rmtree(file.parent)
    message = {
        "truncated": f"checkpoint-3/{FILE} is damaged",
        "bit": f"checkpoint-3/{FILE} is damaged",
        "another": "checkpoint-3 has the unknown file 'model.safetensors'",
    }.get(damage, f"checkpoint-3 lacks the file {FILE}")
    for error in errors_of(folder).split(" | "):
        assert error == message


def rewrite(
    folder: Path,
    tensors: dict[str, Tensor | None],
    offsets: dict[str, Any] | None = None,
    content: bytes | None = None,
) -> None:
    """Replaces tensors of the file, or the whole of it, with a checksum that is right."""
    file = folder / "checkpoint-3" / FILE
    with safe_open(file, framework="pt") as old:
        found = {name: old.get_tensor(name) for name in old.keys()}  # noqa: SIM118
        saved = json.loads(old.metadata()["DCP_SHARDING_INFO"])
    found |= tensors
    found = {name: x for name, x in found.items() if x is not None}
    for name, x in found.items():
        saved.setdefault(name, {"saved_offsets": [0] * x.dim()})
    for name, at in (offsets or {}).items():
        saved[name] = {"saved_offsets": at}
    save_file(found, file, {"DCP_SHARDING_INFO": json.dumps(saved)})
    if content is not None:
        file.write_bytes(content)
    list_file(folder, FILE)


def list_file(folder: Path, name: str) -> None:
    """Sets the size and the checksum of a file in the checkpoint's list."""
    content = (folder / "checkpoint-3" / name).read_bytes()
    entry = {name: (len(content), zlib.crc32(content))}
    edit(folder, lambda state: state["shards"]["files"].update(entry))


@pytest.mark.parametrize(
    ("tensors", "offsets", "message"),
    [
        ({WEIGHT: torch.zeros(15)}, {}, "last_norm.weight must have shape (16,) and dtype"),
        (
            {WEIGHT: torch.zeros(16).double()},
            {},
            "last_norm.weight must have shape (16,) and dtype",
        ),
        ({WEIGHT: torch.full((16,), torch.nan)}, {}, "model.last_norm.weight must be finite"),
        ({WEIGHT: torch.zeros(16, dtype=torch.int64)}, {}, "dtype torch.float32, got (16,)"),
        ({WEIGHT: None}, {}, "model lacks 'last_norm.weight'"),
        ({"model.moon": torch.zeros(1)}, {}, "model has the unknown entry 'moon'"),
        ({"moon": torch.zeros(1)}, {}, "shards have the unknown tensor 'moon'"),
        ({"optimizer.state.99.exp_avg": torch.zeros(1)}, {}, "no place for optimizer.state.99"),
        ({WEIGHT: torch.zeros(8)}, {WEIGHT: [8]}, "must have shards that make up the shape (16,)"),
        ({WEIGHT: torch.zeros(8)}, {WEIGHT: [10**15]}, "must have shards that make up the shape"),
        ({WEIGHT: torch.zeros(16)}, {WEIGHT: [-8]}, "must have shards that make up the shape"),
        ({WEIGHT: torch.zeros(16)}, {WEIGHT: "x"}, "checkpoint-3 is damaged"),
        ({WEIGHT: torch.zeros(16)}, {WEIGHT: [0, 0]}, "make up the shape (16,)"),
    ],
)
def test_invalid_tensor_is_named(
    folder: Path, tensors: dict[str, Tensor | None], offsets: dict[str, Any], message: str
) -> None:
    rewrite(folder, tensors, offsets)
    for error in errors_of(folder).split(" | "):
        assert message in error


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((256, 16), torch.inf), "optimizer state 0.exp_avg must be finite"),
        (torch.zeros(2, 16), "exp_avg must have shape (256, 16)"),
        (None, "optimizer state 0 lacks 'exp_avg'"),
    ],
)
def test_invalid_moment_is_named(folder: Path, value: Tensor | None, message: str) -> None:
    """It only matters to a run."""
    rewrite(folder, {MOMENT: value})
    path = folder / "checkpoint.pt"
    for sharded in (True, False):
        with pytest.raises(CheckpointError) as caught:
            TrainingRun.resume(
                path, data=data_of(CONFIG), distributed=grid_of_processes(sharded=sharded)
            )
        assert message in str(caught.value)
    assert load_model(path).task == CONFIG.task


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, (10).to_bytes(8, "little") + b"not {json}", b"\x80\x04K\x01."]
)
def test_foreign_file_is_refused(folder: Path, content: bytes) -> None:
    rewrite(folder, {}, content=content)
    for error in errors_of(folder).split(" | "):
        assert error.startswith("checkpoint-3 is damaged")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: 8, 8: 4, 12: 4}, None),
        ({0: 8, 8: 4, 11: 4}, "must have shards that make up the shape (15,)"),
        ({0: 8, 2: 4, 12: 4}, "model.last_norm.weight must be finite"),
    ],
)
def test_elements_that_no_file_has_are_named(
    folder: Path, pieces: dict[int, int], message: str | None
) -> None:
    """The last case has as many elements as the tensor, but some twice and others not at all."""
    rewrite(folder, {WEIGHT: None})
    for n, (at, size) in enumerate(pieces.items(), start=2):
        name = FILE.replace("shard-00001", f"shard-0000{n}")
        path = folder / "checkpoint-3" / name
        metadata = {"DCP_SHARDING_INFO": json.dumps({WEIGHT: {"saved_offsets": [at]}})}
        save_file({WEIGHT: torch.zeros(size)}, path, metadata)
        list_file(folder, name)
    if message is None:
        assert load_model(folder / "checkpoint.pt").task == CONFIG.task
    else:
        for error in errors_of(folder).split(" | "):
            assert message in error


def test_unknown_grid_begins_new_random_numbers(folder: Path) -> None:
    """The dropout of a rank is a function of seed, rank and step."""
    path = folder / "checkpoint.pt"
    edit(folder, lambda state: state["random"].append(state["random"][0]))
    states = []
    for _ in range(2):
        resumed = TrainingRun.resume(path, data=data_of(CONFIG))
        states.append(torch.get_rng_state())
        del resumed
    assert torch.equal(*states)
    assert not torch.equal(states[0], load_checkpoint(path)["random"][0]["cpu"])


def test_description_needs_no_more_memory_than_the_files(folder: Path) -> None:
    shards = ShardFiles.of(
        load_checkpoint(folder / "checkpoint.pt", described=True)["shards"], folder
    )
    described = shards.described()
    assert {x.device.type for x in described.values()} == {"meta"}
    assert described.keys() == shards.read().keys()
