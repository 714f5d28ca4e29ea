"""Torch operators of linear attention, opaque to torch.compile.

Their definition does not import Triton; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.triton.operators import register
from ...common.storage import check_storage
from ..base import LinearOperators
from ..operators import BACKWARD, FORWARD, STEPS, backward_fake, forward_fake, steps_fake
from ..types import Inputs, Options, Saved


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    from . import launch

    x, options = Inputs._make(arguments[:9]), Options.unpack(arguments[9:])
    _check(x)
    with torch.cuda.device_of(x.q):  # Triton launches on the current device
        return tuple(launch.forward(x, options))


def _backward(
    do: Tensor,
    dS: Tensor | None,
    dz: Tensor | None,
    o: Tensor,
    normalizer: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    from . import launch

    x, options = Inputs._make(rest[:9]), Options.unpack(rest[9:13])
    _check(x, do=do, dS_end=dS, dz_end=dz, o=o, normalizer=normalizer)
    with torch.cuda.device_of(x.q):
        gradients = launch.backward(
            x, options, Saved(o, normalizer), do, (dS, dz), log_decay_needs_grad=rest[13]
        )
    return tuple(x.q.new_empty(0) if g is None else g for g in gradients)


def _steps(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    from . import launch

    x = Inputs(q, k, v, *rest[:3])
    feature_map, normalize, eps = rest[3:]
    _check(x)
    with torch.cuda.device_of(q):
        return launch.steps(x, Options.unpack((feature_map, True, normalize, eps)))


def _check(x: Inputs, **tensors: Tensor | None) -> None:
    check_storage((*x._asdict().items(), *tensors.items()))


OPERATORS = LinearOperators(
    register("triton_linear_forward", FORWARD, _forward, forward_fake),
    register("triton_linear_backward", BACKWARD, _backward, backward_fake),
    register("triton_linear_steps", STEPS, _steps, steps_fake),
)
