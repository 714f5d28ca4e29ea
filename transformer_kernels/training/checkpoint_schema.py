"""Schema of checkpoints: what each entry of a state must be, checked before any of it is used.

`check_model` checks what a model needs, `check_progress` what a run needs besides, and
`check_state` the entries that a trainer restores. Errors name the entry, and what it is instead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.argument_checks import shown
from .checkpoint_error import CheckpointError
from .config import TrainConfig
from .curves import CurveRow
from .memory import check_model_fits
from .plain_fields import is_text
from .task import Shapes, Task
from .tasks import config_from_dict

State = dict[str, Any]


def entry(state: State, name: str, *types: type) -> Any:
    """The value of a key such as "data" or "data.name", which must be of one of these types."""
    parent, _, key = name.rpartition(".")
    values = entry(state, parent, dict) if parent else state
    if key not in values:
        raise CheckpointError(f"it lacks {name!r}")
    value = values[key]
    if (dict if isinstance(value, OrderedDict) else type(value)) not in types:
        wanted = " or ".join("None" if one is type(None) else one.__name__ for one in types)
        raise CheckpointError(f"{name} must be of type {wanted}, got {shown(value)}")
    if isinstance(value, str) and not is_text(value):
        raise CheckpointError(f"{name} must be text, got {shown(value)}")
    return value


def config_of(state: State) -> TrainConfig:
    """The config of a state, whose task is of the state's kind."""
    try:
        config = config_from_dict(entry(state, "config", dict))
    except ValueError as error:
        raise CheckpointError(f"the config is not one of this version: {error}") from None
    if config.task.kind != state.get("kind"):
        raise CheckpointError(
            f"kind is {shown(state.get('kind'))}, but the config that of a {config.task.kind}"
        )
    return config


def check_model(state: State, task: Task) -> None:
    """Checks weights and extra data. Allocates nothing of the model, whatever its sizes."""
    weights = entry(state, "model", dict)
    layers = getattr(task.model, "layers", 1)
    if layers > len(weights):
        raise CheckpointError(f"model has {len(weights)} tensors, but the config {layers} layers")
    try:
        check_model_fits(task, training=False)
        task.check_extra(entry(state, "extra", dict))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    with torch.device("meta"):
        model = task.build("eager")
    check_tensors("model", weights, model.state_dict(), described="shards" in state)


def check_progress(state: State, config: TrainConfig) -> None:
    """Checks the entries about the data, and the curve."""
    entry(state, "data.name", str)
    entry(state, "data.source", str, type(None))
    entry(state, "data.digest", str)
    steps = _steps(state, config)
    rows = entry(state, "rows", Tensor)
    _check_plain("rows", rows, (steps, len(CurveRow._fields)), torch.float64)
    at = {name: n for n, name in enumerate(CurveRow._fields)}
    required = [n for name, n in at.items() if name not in ("val_loss", "score")]
    if not bool(rows[:, required].isfinite().all()):
        raise CheckpointError("rows must be finite, except for losses of validations")
    if bool((rows[:, at["seconds"]] <= 0).any()):
        raise CheckpointError("rows must have seconds above 0")
    if rows[:, at["step"]].tolist() != list(range(1, steps + 1)):
        raise CheckpointError(f"rows must count the steps from 1 to {steps}")


def check_state(
    state: State,
    *,
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    scaler: Mapping[str, Any],
) -> None:
    """Checks the entries that a trainer restores against its own.

    Args:
        state: the state; its tensors may be the shards of one rank.
        config: settings of the run.
        weights: the model's tensors, or this rank's shards of them.
        optimizer: the trainer's optimizer.
        parameters: the parameters of the optimizer in its order, or this rank's shards of them.
        scaler: state of a new loss scaler.

    Raises:
        CheckpointError: an entry is absent or invalid.
    """
    steps = _steps(state, config)
    check_tensors("model", entry(state, "model", dict), weights)
    _check_groups(entry(state, "optimizer.param_groups", list), optimizer)
    moments = entry(state, "optimizer.state", dict)
    if moments or not (scaler or steps == 0):  # float16 may have skipped all updates so far
        _check_moments(moments, parameters, steps)
    _check_scaler(entry(state, "scaler", dict), scaler)
    _check_generator("batches", entry(state, "batches", Tensor))
    _check_random(state)


def _check_random(state: State) -> None:
    """Checks the random states of all ranks, and the grid of processes that they belong to."""
    random = entry(state, "random", list)
    if not random:
        raise CheckpointError("random must have the states of at least one process")
    if "context_parallel" in state:
        neighbours: int = entry(state, "context_parallel", int)
        if neighbours < 1 or len(random) % neighbours:
            raise CheckpointError(
                f"context_parallel must divide the number of processes, {len(random)}, got "
                f"{neighbours}"
            )
    for rank, one in enumerate(random):
        name = f"random {rank}"
        _check_generator(f"{name}.cpu", entry({name: one}, f"{name}.cpu", Tensor))
        device = entry({name: one}, f"{name}.device", Tensor, type(None))
        if device is not None:
            _check_plain(f"{name}.device", device, (device.numel(),), torch.uint8)


def check_states(state: State, expected: Sequence[Sequence[Shapes]], dtype: torch.dtype) -> None:
    """Checks the states of a `RecurrentTask`: `expected` has their shapes by rank and part."""
    found = entry(state, "states", list)
    _check_length("states", found, list, len(expected))
    for rank, parts in enumerate(expected):
        _check_length(f"states.{rank}", found[rank], list, len(parts))
        for n, shapes in enumerate(parts):
            tensors = found[rank][n]
            _check_length(f"states.{rank}.{n}", tensors, tuple, len(shapes))
            for m, shape in enumerate(shapes):
                _check_plain(f"states.{rank}.{n}.{m}", tensors[m], shape, dtype)
                _check_finite(f"states.{rank}.{n}.{m}", tensors[m])


def _check_length(name: str, value: Any, kind: type[Sequence[Any]], length: int) -> None:
    """Checks that a value is a list or a tuple of so many elements."""
    if type(value) is not kind:
        raise CheckpointError(f"{name} must be of type {kind.__name__}, got {shown(value)}")
    if len(value) != length:
        raise CheckpointError(f"{name} must have {length} elements, got {len(value)}")


def _steps(state: State, config: TrainConfig) -> int:
    steps: int = entry(state, "steps_done", int)
    if not 0 <= steps <= config.steps:
        raise CheckpointError(f"steps_done must be between 0 and {config.steps}, got {steps}")
    return steps


def check_tensors(
    name: str,
    found: Mapping[Any, Any],
    expected: Mapping[str, Tensor],
    *,
    described: bool = False,
) -> None:
    """Checks that `found` has finite tensors with the keys, shapes and dtypes of `expected`.

    If `described`, they are meta tensors, whose values cannot be checked.
    """
    _check_keys(name, found, expected)
    for key, tensor in expected.items():
        shape = tuple(tensor.shape)
        if described:
            _check_shape(f"{name}.{key}", found[key], shape, tensor.dtype)
        else:
            _check_plain(f"{name}.{key}", found[key], shape, tensor.dtype)
            _check_finite(f"{name}.{key}", found[key])


def _check_keys(name: str, found: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    for key in expected:
        if key not in found:
            raise CheckpointError(f"{name} lacks {key!r}")
    for key in found:
        if key not in expected:
            raise CheckpointError(f"{name} has the unknown entry {shown(key)}")


def _check_plain(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Checks that a value is a contiguous tensor, which is as large in the file as in memory."""
    _check_shape(name, value, shape, dtype)
    strided = value.layout == torch.strided and value.device.type == "cpu"
    if not strided or not value.is_contiguous() or value.requires_grad:
        raise CheckpointError(f"{name} must be a contiguous tensor on the CPU without gradient")


def _check_shape(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if type(value) is not Tensor:
        raise CheckpointError(f"{name} must be a tensor, got {shown(value)}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise CheckpointError(
            f"{name} must have shape {shape} and dtype {dtype}, "
            f"got {tuple(value.shape)} and {value.dtype}"
        )


def _check_finite(name: str, value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise CheckpointError(f"{name} must be finite, got NaN or infinity")


def _check_groups(found: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """Checks which parameters are in which group. Other settings of a group are the config's."""
    numbers = [group.get("params") if type(group) is dict else None for group in found]
    expected = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    flat = [number for group in numbers if type(group) is list for number in group]
    if any(type(number) is not int for number in flat) or numbers != expected:
        raise CheckpointError("optimizer.param_groups must have the parameters of the model")


def _check_moments(found: dict[Any, Any], parameters: Sequence[Tensor], steps: int) -> None:
    trained = {n: p for n, p in enumerate(parameters) if p.requires_grad}
    _check_keys("optimizer.state", found, trained)
    for n, parameter in trained.items():
        name = f"optimizer state {n}"
        values = entry({name: found[n]}, name, dict)
        _check_keys(name, values, dict.fromkeys(("step", "exp_avg", "exp_avg_sq")))
        step = entry({name: values}, f"{name}.step", Tensor)
        dtype = torch.float64 if step.dtype == torch.float64 else torch.float32
        _check_plain(f"{name}.step", step, (), dtype)
        if not (1 <= step.item() <= steps and step.item().is_integer()):
            raise CheckpointError(
                f"{name}.step must be a whole number from 1 to {steps}, got {step.item()}"
            )
        for key in ("exp_avg", "exp_avg_sq"):
            _check_plain(f"{name}.{key}", values[key], tuple(parameter.shape), parameter.dtype)
            _check_finite(f"{name}.{key}", values[key])
        if bool((values["exp_avg_sq"] < 0).any()):
            raise CheckpointError(f"{name}.exp_avg_sq must be at least 0")


def _check_scaler(found: State, expected: Mapping[str, Any]) -> None:
    _check_keys("scaler", found, expected)
    for key, value in expected.items():
        one = entry({"scaler": found}, f"scaler.{key}", type(value))
        if not math.isfinite(one) or one < 0 or (key == "scale" and one == 0):
            raise CheckpointError(f"scaler.{key} must be positive and finite, got {one}")
        if key not in ("scale", "_growth_tracker") and one != value:
            raise CheckpointError(f"scaler.{key} must be {value}, got {one}")


def _check_generator(name: str, value: Tensor) -> None:
    generator = torch.Generator()
    _check_plain(name, value, tuple(generator.get_state().shape), torch.uint8)
    try:
        generator.set_state(value)
    except RuntimeError:
        raise CheckpointError(f"{name} must be the state of a random generator") from None
