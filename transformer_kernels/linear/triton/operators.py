"""Torch operators of linear attention, opaque to torch.compile.

Their definition does not import Triton; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...backends.triton.operators import register
from ...common.storage import check_storage
from .. import operators
from ..base import Names


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    from . import launch

    x, options = operators.unpack(arguments)
    check_storage(x._asdict().items())
    with torch.cuda.device_of(x.q):  # Triton launches on the current device
        return tuple(launch.forward(x, options))


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    from . import launch

    call = operators.unpack_backward(arguments)
    names = (field.name for field in operators.BACKWARD_FIELDS)
    check_storage(zip(names, arguments, strict=True))
    with torch.cuda.device_of(call.x.q):
        return launch.backward(call).outputs()


def _steps(*arguments: Any) -> Tensor:
    from . import launch

    x, options = operators.unpack_steps(arguments)
    check_storage(x._asdict().items())
    with torch.cuda.device_of(x.q):
        return launch.steps(x, options)


NAMES = Names("triton_linear_forward", "triton_linear_backward", "triton_linear_steps")
register(NAMES.forward, operators.FORWARD, _forward, operators.forward_fake)
register(NAMES.backward, operators.BACKWARD, _backward, operators.backward_fake)
register(NAMES.steps, operators.STEPS, _steps, operators.steps_fake)
