"""Inference with a model that may be in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def inference(model: object) -> Iterator[torch.device]:
    """Context manager without gradients and dropout, which yields the device of the model.

    `model` must be an `nn.Module`; its training mode is restored at the end.
    """
    assert isinstance(model, nn.Module)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)
