"""Feature maps that the kernels compute. A callable is applied before them, with "identity"."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1.0,
    "relu": torch.relu,
    "identity": lambda x: x,
}
"""In the order of tk::FeatureMap in csrc/common/linear_params.h."""

FeatureMap = str | Callable[[Tensor], Tensor]
