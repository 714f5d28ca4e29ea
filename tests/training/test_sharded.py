"""Checkpoints of a run whose parameters are divided, over a group of one process."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import distributed as dist

from tests.training.divided import GPT2, data_of, start_or_resume, train_until
from tests.training.run_helpers import SHARD, edit_tensors, put
from transformer_kernels.training import Checkpoint, CheckpointError, load_model, resume, train
from transformer_kernels.training.distributed import end_process_group

CONFIG = replace(GPT2, eval_every=2)
WEIGHT = "model.last_norm.weight"


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
        assert sorted(path.name for path in saved.iterdir()) == [
            ".lock",
            "checkpoint-8",
            "curve.csv",
        ]


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
