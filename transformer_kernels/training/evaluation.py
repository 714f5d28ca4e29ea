"""Evaluation of a trained model on held-out data: a text read in lanes, or examples."""

from __future__ import annotations

import math
from itertools import islice
from typing import NamedTuple

from torch import nn

from ..models.generation import inference
from ..nn.options import check_positive
from .data import Batch, Dataset, LaneDataset
from .task import State, Task


class Evaluation(NamedTuple):
    """Result of `evaluate` or `evaluate_examples`."""

    score: float
    """See `Task.score_name`"""
    loss: float
    """Mean loss, in nats"""
    tokens: int
    """Number of tokens that were predicted"""


def evaluate(
    task: Task, model: nn.Module, data: LaneDataset, *, lanes: int, segments: int | None = None
) -> Evaluation:
    """Computes loss and score on the held-out lanes of a text, in order.

    A model with a state starts with an empty one and carries it from segment to segment. Draws no
    random numbers.

    Args:
        task: task of the model, with one loss, whose score depends on the loss alone.
        model: a model of the task; its training mode is restored.
        data: the text.
        lanes: number of lanes, which are read side by side; fewer if the text is too short.
        segments: number of segments of each lane to read; all unless given.

    Raises:
        ValueError: `lanes` is not positive.
    """
    total, tokens = 0.0, 0
    state: State = ()
    with inference(model) as device:
        for batch in islice(data.held_out_segments(lanes), segments):
            on_device = {name: x.to(device) for name, x in batch.items()}
            sums, state = task.carry(model, on_device, state)
            total += math.fsum(x.item() for x in sums.values())
            tokens += task.tokens(batch)
    loss = total / tokens
    return Evaluation(task.score(model, data, (), loss), loss, tokens)


def evaluate_examples(
    task: Task, model: nn.Module, data: Dataset, *, count: int, batch: int = 32
) -> Evaluation:
    """Computes loss and score on held-out examples, the same at every call.

    Draws no random numbers.

    Args:
        task: task of the model.
        model: a model of the task; its training mode is restored.
        data: the examples.
        count: number of examples, fewer if the data has fewer.
        batch: examples that are read at a time.

    Raises:
        ValueError: `count` or `batch` is not positive.
    """
    check_positive("count", count)
    check_positive("batch", batch)
    held_out = data.held_out(count)
    terms = task.counts(held_out)
    parts = zip(*(x.split(batch) for x in held_out.values()), strict=True)
    with inference(model) as device:
        batches: list[Batch] = [
            {name: x.to(device) for name, x in zip(held_out, part, strict=True)} for part in parts
        ]
        sums = [task.losses(model, each) for each in batches]
        loss = math.fsum(each[name].item() / max(1, terms[name]) for each in sums for name in terms)
        score = task.score(model, data, batches, loss)
    return Evaluation(score, loss, sum(terms.values()))
