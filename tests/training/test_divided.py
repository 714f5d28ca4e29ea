"""Trainings whose work is divided over processes: losses, checkpoints, errors."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import distributed as dist

from tests.support.processes import assert_runs
from tests.support.tiers import each
from tests.training.run_helpers import (
    FINISHED,
    GENERATOR,
    GPT2,
    RUN,
    SHARD,
    data_of,
    edit_tensors,
    names,
    put,
    start_or_resume,
    train_until,
)
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.training import (
    PRESETS,
    TASKS,
    Checkpoint,
    CheckpointError,
    TrainConfig,
    Trainer,
    load_model,
    read_curve,
    resume,
    train,
)
from transformer_kernels.training.distributed import (
    DistributedContext,
    check_processes,
    check_scale_out,
    distributed_context,
    end_process_group,
)

HERE = "tests.training.run_helpers"


def test_two_processes_that_share_sequences_have_the_losses_of_one() -> None:
    assert_runs(2, f"{HERE}:check_context_parallel")


@pytest.mark.exhaustive
def test_four_processes_that_share_sequences_have_the_losses_of_one() -> None:
    assert_runs(4, f"{HERE}:check_context_parallel")


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_parameters_have_the_losses_of_one(count: int) -> None:
    assert_runs(count, f"{HERE}:check_sharded")


@pytest.mark.exhaustive
def test_sharded_run_resumes_with_the_same_bits_or_names_the_damage(tmp_path: Path) -> None:
    assert_runs(2, f"{HERE}:check_sharded_checkpoints", tmp_path)


def assert_curve_of_one_process(folder: Path) -> None:
    expected = train(RUN, data_of(RUN)).rows
    found = read_curve(folder / "curve.csv")
    losses = [[(row.train_loss, row.val_loss or 0.0) for row in rows] for rows in (found, expected)]
    assert_same_function(*map(torch.tensor, losses))


@pytest.mark.exhaustive
def test_run_continues_on_any_grid_of_processes(tmp_path: Path) -> None:
    """(processes, last step, context_parallel, sharded): every kind of checkpoint into every."""
    for count, *words in ((2, 2, 1, 1), (4, 4, 2, 1), (3, 6, 1, 0), (2, 0, 2, 1)):
        assert_runs(count, f"{HERE}:train_part", tmp_path, *words)
        folders = [path.name for path in tmp_path.glob("checkpoint-*")]
        assert folders == [f"checkpoint-{words[0] or RUN.steps}"]
    assert_curve_of_one_process(tmp_path)
    assert load_model(tmp_path, "gpt2").task == RUN.task


@pytest.mark.exhaustive
def test_run_of_two_processes_continues_on_one(tmp_path: Path) -> None:
    for name, words in {"sharded": (3, 1, 1), "not": (5, 2, 0)}.items():
        assert_runs(2, f"{HERE}:train_part", tmp_path / name, *words)
        resume(tmp_path / name, data=data_of(RUN))
        assert names(tmp_path / name) == FINISHED
        assert_curve_of_one_process(tmp_path / name)


def test_ranks_share_the_examples_and_neighbours_have_the_same() -> None:
    batch = {"tokens": torch.arange(5)}
    for grid, expected in (
        ((2, 1), [[0, 2, 4], [1, 3]]),
        ((4, 2), [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]),
    ):
        ranks = [DistributedContext(rank, *grid) for rank in range(grid[0])]
        assert [rank.shard(batch)["tokens"].tolist() for rank in ranks] == expected


def with_model(config: TrainConfig, **sizes: Any) -> TrainConfig:
    task = replace(config.task, model=replace(config.task.model, **sizes))
    return replace(config, task=task)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_model(GPT2, context=26), "context must be a multiple of 4 .*over 2 proc.*, got 26"),
        (with_model(GPT2, dropout=0.1), "context must be a multiple of 64 .*dropout, got 24"),
        (replace(GENERATOR, attn_implementation="sdpa"), "must be 'fused' or 'eager' .* 'sdpa'"),
        (replace(GPT2, batch=4, accumulate=3), "that do not share sequences, 3 x 2, got 4"),
    ],
)
def test_settings_that_do_not_divide_are_refused(config: TrainConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(config, data_of(config), DistributedContext(0, 4, 2))


def test_float16_is_refused_where_parameters_are_divided() -> None:
    config = replace(GPT2, precision="float16")
    check_scale_out(config, DistributedContext(0, 2, context_parallel=2))
    with pytest.raises(ValueError, match="got float16: use bfloat16"):
        check_scale_out(config, DistributedContext(0, 2, sharded=True))


@each("kind", [kind for kind, task in TASKS.items() if not task.scales_out])
def test_other_tasks_are_refused(kind: str) -> None:
    config = next(iter(PRESETS[kind].values()))
    config = replace(config, batch=2)
    check_scale_out(config, DistributedContext(0, 2))
    with pytest.raises(ValueError, match=f"for the tasks generator, gpt2, got the task {kind}"):
        check_scale_out(config, DistributedContext(0, 2, context_parallel=2))


def test_number_of_processes_is_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for ranks in (-1, 0, 3):
        with pytest.raises(ValueError, match=rf"context_parallel.*(, got {ranks}|3, got 4)"):
            check_processes(ranks)


def test_single_process_cannot_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with distributed_context() as distributed:
        assert distributed == DistributedContext()
    for grid in ((2, False), (1, True)):
        with (
            pytest.raises(ValueError, match="torchrun --nproc-per-node N"),
            distributed_context(*grid),
        ):
            pass


CONFIG = replace(GPT2, eval_every=2)
WEIGHT = "model.last_norm.weight"


@pytest.fixture(scope="module")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    end_process_group()


@pytest.fixture(scope="module")
def trained(_group: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_until(start_or_resume(folder, CONFIG, sharded=True), 3)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Folder of a run of 8 steps, stopped after 3."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_run_resumes_sharded_or_not_with_the_same_losses(folder: Path, tmp_path: Path) -> None:
    """From a checkpoint of either, which have the same entries."""
    expected = train(CONFIG, data_of(CONFIG)).losses
    steps = iter(range(1, 9))
    train(CONFIG, data_of(CONFIG), out=tmp_path / "plain", should_stop=lambda: next(steps) == 3)
    found = [Checkpoint.open(each) for each in (folder, tmp_path / "plain")]
    assert found[0].tensors.keys() == found[1].tensors.keys()
    assert found[0].metadata == found[1].metadata
    for saved in (folder, tmp_path / "plain"):
        other = Path(shutil.copytree(saved, tmp_path / f"other {saved.name}"))
        assert resume(other, data=data_of(CONFIG)).losses == expected
        result = start_or_resume(saved, CONFIG, sharded=True).train()
        assert result.losses == expected
        assert result.checkpoint == saved / "checkpoint-8"
        assert names(saved) == FINISHED


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
    assert Checkpoint.open(folder).metadata.steps_done == 3


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({0: 8, 8: 4, 12: 4}, None),
        ({0: 8, 8: 4, 11: 4}, r"must have shape \(16,\)"),
        ({0: 8, 2: 4, 12: 4}, r"model\.last_norm\.weight must be finite"),
    ],
)
def test_elements_that_no_file_has_are_named(
    folder: Path, pieces: dict[int, int], message: str | None
) -> None:
    """The last case has as many elements as the tensor, but some twice and others not at all."""
    checkpoint = folder / "checkpoint-3"
    edit_tensors(checkpoint, {WEIGHT: None})
    for n, (at, size) in enumerate(pieces.items(), start=2):
        metadata = {"DCP_SHARDING_INFO": json.dumps({WEIGHT: {"saved_offsets": [at]}})}
        name = SHARD.replace("shard-00001", f"shard-0000{n}")
        put(checkpoint, name, save({WEIGHT: torch.zeros(size)}, metadata))
    if message is None:
        assert not load_model(folder).model.get_parameter("last_norm.weight").any()
        return
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)
    with pytest.raises(CheckpointError, match=message):
        start_or_resume(folder, CONFIG, sharded=True)
