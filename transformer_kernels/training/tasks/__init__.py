"""Training tasks of the reference models, one file each."""

from __future__ import annotations

from typing import Any

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
        KeyError, TypeError, ValueError: the fields are not those of a task.
    """
    fields = dict(fields)
    task = TASKS[fields.pop("kind")]
    return task(**fields | {"model": task.config_type(**fields["model"])})


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
