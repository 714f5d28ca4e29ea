"""Training tasks of the reference models, one file each."""

from __future__ import annotations

from typing import Any

from transformer_kernels.argument_checks import shown
from transformer_kernels.training.plain_fields import from_fields
from transformer_kernels.training.task import Task
from transformer_kernels.training.tasks.bert import BertTask
from transformer_kernels.training.tasks.classifier import ClassifierTask
from transformer_kernels.training.tasks.generator import GeneratorTask
from transformer_kernels.training.tasks.gpt2 import GPT2Task
from transformer_kernels.training.tasks.lookup import LookupTask
from transformer_kernels.training.tasks.translator import TranslatorTask

TASKS: dict[str, type[Task]] = {
    task.kind: task
    for task in (GeneratorTask, GPT2Task, ClassifierTask, TranslatorTask, BertTask, LookupTask)
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


__all__ = [
    "TASKS",
    "BertTask",
    "ClassifierTask",
    "GPT2Task",
    "GeneratorTask",
    "LookupTask",
    "TranslatorTask",
    "task_from_dict",
]
