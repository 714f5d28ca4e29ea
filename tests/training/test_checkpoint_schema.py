"""Edited checkpoints: every entry that is absent or invalid is a CheckpointError that names it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.training import (
    PRESETS,
    CheckpointError,
    Dataset,
    Tokens,
    TrainConfig,
    load_checkpoint,
    load_model,
    resume,
    save_checkpoint,
    train,
)

ABSENT = object()
WEIGHT = ("model", "embedding.weight")
SIMILAR = (("model",), ("optimizer", "state"), ("config",))
MOMENT = ("optimizer", "state", 0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {}


@pytest.fixture
def state(
    original: dict[str, Any], config: TrainConfig, data: Dataset, tmp_path: Path
) -> dict[str, Any]:
    """State of a float16 run after three of eight steps. Trained once, copied for each test."""
    if not original:
        stop = iter((False, False, True))
        config = replace(config, precision="float16")
        train(config, data, out=tmp_path / "run", should_stop=lambda: next(stop))
        original.update(load_checkpoint(tmp_path / "run" / "checkpoint.pt"))
    return copy.deepcopy(original)


def edit(state: Any, path: tuple[Any, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        state = state[parent]
    if value is ABSENT:
        del state[key]
    else:
        state[key] = value


def resume_error(state: dict[str, Any], data: Dataset, folder: Path) -> str:
    """Saves the state and resumes it, which must fail; returns the error without the path."""
    path = folder / "edited.pt"
    torch.save(state, path)
    with pytest.raises(CheckpointError) as caught:
        resume(path, data=data)
    assert not list(folder.glob("*.csv"))
    name, _, text = str(caught.value).partition(": ")
    assert name == str(path) or "of transformer_kernels" in str(caught.value)
    assert "\n" not in text
    return text


def keys_of(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys of nested dicts; of many similar ones, the last."""
    if isinstance(state, dict):
        keys = list(state)
        for key in keys[-1:] if path in SIMILAR else keys:
            yield (*path, key)
            yield from keys_of(state[key], (*path, key))


def test_state_as_saved_resumes(state: dict[str, Any], data: Dataset, tmp_path: Path) -> None:
    save_checkpoint(state, tmp_path / "edited.pt", kind=state["kind"])
    assert resume(tmp_path / "edited.pt", data=data).finished


def test_every_absent_key_is_named(state: dict[str, Any], data: Dataset, tmp_path: Path) -> None:
    for path in keys_of(state):
        edited = copy.deepcopy(state)
        edit(edited, path, ABSENT)
        text = resume_error(edited, data, tmp_path)
        assert str(path[-1]) in text or path[-1] in ("format", "kind"), (path, text)


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, torch.zeros(2)], ids=str)
def test_every_value_of_another_type_is_named(
    state: dict[str, Any], data: Dataset, tmp_path: Path, value: Any
) -> None:
    for name in state.keys() - {"format", "kind"}:
        if not (name == "extra" and value == {}):
            edited = state | {name: value}
            text = resume_error(edited, data, tmp_path)
            assert name in text


def tensor(fill: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, fill, dtype=dtype)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (WEIGHT, tensor(0, 3), "model.embedding.weight must have shape (256, 16)"),
        (WEIGHT, tensor(0, 256, 16, dtype=torch.float64), "dtype torch.float32, got"),
        (WEIGHT, tensor(float("nan"), 256, 16), "model.embedding.weight must be finite"),
        (WEIGHT, tensor(0, 1).expand(256, 16), "must be a contiguous tensor"),
        (WEIGHT, tensor(0, 256, 16).to_sparse(), "must be a contiguous tensor"),
        (WEIGHT, torch.empty(256, 16, device="meta"), "must be a contiguous tensor"),
        (("model", "moon"), tensor(0, 1), "model has the unknown entry 'moon'"),
        (("optimizer", "param_groups"), [], "must have the parameters of the model"),
        ((*MOMENT, "step"), tensor(-1), "optimizer state 0.step must be a whole number from 1"),
        ((*MOMENT, "step"), tensor(float("inf")), "optimizer state 0.step must be a whole"),
        ((*MOMENT, "exp_avg"), tensor(0, 5), "optimizer state 0.exp_avg must have shape"),
        ((*MOMENT, "exp_avg_sq"), tensor(-1, 256, 16), "exp_avg_sq must be at least 0"),
        (("scaler", "scale"), float("nan"), "scaler.scale must be positive and finite"),
        (("scaler", "growth_interval"), 3, "scaler.growth_interval must be 2000, got 3"),
        (("steps_done",), -1, "steps_done must be between 0 and 8, got -1"),
        (("steps_done",), 9, "steps_done must be between 0 and 8, got 9"),
        (("steps_done",), True, "steps_done must be of type int, got True"),
        (("rows",), tensor(0, 2, 7, dtype=torch.float64), "rows must have shape (3, 7)"),
        (("rows",), tensor(1, 3, 7, dtype=torch.float64), "rows must count the steps"),
        (("batches",), tensor(0, 5056, dtype=torch.uint8), "batches must be the state of a random"),
        (("random", 0, "cpu"), tensor(0, 8, dtype=torch.uint8), "random 0.cpu must have shape"),
        (("random",), [None], "random 0 must be of type dict, got None"),
        (("random",), [], "random must have the states of at least one process"),
        (("context_parallel",), 2, "context_parallel must divide the number of processes, 1, got"),
        (("context_parallel",), 0, "context_parallel must divide the number of processes, 1, got"),
        (("context_parallel",), 1.0, "context_parallel must be of type int, got 1.0"),
        (("data", "source"), "a\0b", "data.source must be text"),
        (("config", "moon"), 3, "config has unknown fields: 'moon'"),
        (("config", "betas"), [0.9, None], "config.betas must be of type float, got None"),
        (("config", "betas"), [0.9, 1.0], "betas must be at least 0 and below 1, got 1.0"),
        (("config", "weight_decay"), float("nan"), "weight_decay must be at least 0 and finite"),
        (("config", "recompute"), "yes", "config.recompute must be of type bool, got 'yes'"),
        (("config", "steps"), 10**30, "config.steps must be of type int, got 1000"),
        (("config", "schedule", "warmup"), 2.5, "config.schedule.warmup must be of type int"),
        (("config", "task", "kind"), "moon", "config.task.kind must be one of generator, gpt2"),
        (("config", "task", "model", "layers"), 10**12, "32 tensors, but the config 1000000000000"),
        (("config", "task", "model", "width"), 10**12, "the model needs"),
        (("kind",), "gpt2", "kind is 'gpt2', but the config that of a generator"),
        (("extra", "tokens"), "", "extra must have the keys [], got ["),
    ],
)
def test_invalid_entry_is_named(
    state: dict[str, Any], data: Dataset, tmp_path: Path,
    path: tuple[Any, ...], value: Any, message: str,
) -> None:  # fmt: skip
    edit(state, path, value)
    assert message in resume_error(state, data, tmp_path)


def test_only_float16_may_have_no_moments(
    state: dict[str, Any], data: Dataset, tmp_path: Path
) -> None:
    """It may have skipped every update."""
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "float16.pt")
    assert resume(tmp_path / "float16.pt", data=data).finished
    state["config"]["precision"], state["scaler"] = "float32", {}
    (tmp_path / "curve.csv").unlink()
    assert resume_error(state, data, tmp_path) == "optimizer.state lacks 0"


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


def test_model_alone_is_enough_for_inference(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    kept = {name: state[name] for name in ("config", "model", "extra")}
    save_checkpoint(kept, path, kind="generator")
    assert not load_model(path).model.training
    save_checkpoint(kept | {"model": {}}, path, kind="generator")
    with pytest.raises(CheckpointError, match=r"model\.pt: model has 0 tensors"):
        load_model(path)
