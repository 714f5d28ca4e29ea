"""Training tasks of the reference models, with the presets of their runs."""

from __future__ import annotations

from typing import Any

from ...common.argument_checks import shown
from ..config import TrainConfig, from_fields
from ..task import Task
from .language import (
    BertTask,
    GatedDeltaNetTask,
    GeneratorTask,
    GPT2Task,
    LinearTransformerTask,
    ReformerTask,
    SparseTransformerTask,
    TransformerXLTask,
)
from .presets import PRESETS
from .supervised import (
    ClassifierTask,
    GatedDeltaNetRecallTask,
    LinearCopyTask,
    LinearRecallTask,
    LookupTask,
    ReformerCopyTask,
    TranslatorTask,
    facts_from_extra,
)

__all__ = [
    "PRESETS",
    "TASKS",
    "BertTask",
    "ClassifierTask",
    "GPT2Task",
    "GatedDeltaNetRecallTask",
    "GatedDeltaNetTask",
    "GeneratorTask",
    "LinearCopyTask",
    "LinearRecallTask",
    "LinearTransformerTask",
    "LookupTask",
    "ReformerCopyTask",
    "ReformerTask",
    "SparseTransformerTask",
    "TransformerXLTask",
    "TranslatorTask",
    "config_from_dict",
    "facts_from_extra",
    "task_from_dict",
]

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
    options = {name: value for name, value in fields.items() if name != "kind"}
    return from_fields(TASKS[fields["kind"]], options, "config.task")


def config_from_dict(fields: dict[str, Any]) -> TrainConfig:
    """Inverse of `TrainConfig.to_dict`.

    Raises:
        ValueError: the fields are not those of a config.
    """
    if "task" not in fields:
        raise ValueError("config lacks 'task'")
    return from_fields(TrainConfig, fields, "config", task=task_from_dict(fields["task"]))
