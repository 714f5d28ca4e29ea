"""Training tasks of the reference models, one file each, with the presets of their runs."""

from __future__ import annotations

from typing import Any

from ...common.argument_checks import shown
from ..config import TrainConfig, from_fields
from ..task import Task
from . import (
    bert,
    classifier,
    generator,
    gpt2,
    linear_copy,
    linear_transformer,
    lookup,
    reformer,
    reformer_copy,
    sparse_transformer,
    transformer_xl,
    translator,
)

PRESETS: dict[str, dict[str, TrainConfig]] = {
    "generator": generator.PRESETS,
    "gpt2": gpt2.PRESETS,
    "transformer-xl": transformer_xl.PRESETS,
    "sparse": sparse_transformer.PRESETS,
    "reformer": reformer.PRESETS,
    "reformer-copy": reformer_copy.PRESETS,
    "linear": linear_transformer.PRESETS,
    "linear-copy": linear_copy.PRESETS,
    "classifier": classifier.PRESETS,
    "translator": translator.PRESETS,
    "bert": bert.PRESETS,
    "lookup": lookup.PRESETS,
}
"""Named settings of training runs, by kind of task and by name; the first of each kind is its
default."""

TASKS: dict[str, type[Task]] = {
    kind: type(preset.task) for kind, named in PRESETS.items() for preset in named.values()
}
"""Task classes by kind"""


def task_from_dict(fields: dict[str, Any]) -> Task:
    """Inverse of `Task.to_dict`.

    Raises:
        ValueError: the fields are not those of a task.
    """
    if type(fields) is not dict or type(fields.get("kind")) is not str:
        raise ValueError("config.task must be a dict with a kind")
    if fields["kind"] not in TASKS:
        raise ValueError(
            f"config.task.kind must be one of {', '.join(TASKS)}, got {shown(fields['kind'])}"
        )
    task = TASKS[fields["kind"]]
    options = {name: value for name, value in fields.items() if name not in ("kind", "model")}
    model = from_fields(task.config_type, fields.get("model"), "config.task.model")
    return from_fields(task, options, "config.task", model=model)


def config_from_dict(fields: dict[str, Any]) -> TrainConfig:
    """Inverse of `TrainConfig.to_dict`.

    Raises:
        ValueError: the fields are not those of a config.
    """
    if "task" not in fields:
        raise ValueError("config lacks 'task'")
    return from_fields(TrainConfig, fields, "config", task=task_from_dict(fields["task"]))
