"""Arguments of the operators, and recording of those that a call runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from transformer_kernels.masks.constraints import UNBOUNDED
from transformer_kernels.problem import TensorArgs

FORWARD = "transformer_kernels::attention_forward"
BACKWARD = "transformer_kernels::attention_backward"


def operators_run_by(call: Callable[[], object]) -> Counter[str]:
    """Returns how often each operator ran during `call()`, by name ("aten::copy_")."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return Counter(event.name for event in profiler.events())


def operator_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> list[Any]:
    """Arguments of the forward operators. `given` are fields of TensorArgs and scalar arguments;
    the defaults are no tensors, no options and no window."""
    scalars: dict[str, Any] = {
        "scale": 0.25, "softcap": 0.0, "dropout_p": 0.0,
        "diagonal_low": -UNBOUNDED, "diagonal_high": UNBOUNDED, "block_size": 0,
        "alibi_offset": 0, "bottom_right": False,
        "max_seqlen_q": q.shape[2], "max_seqlen_k": k.shape[2],
    }  # fmt: skip
    assert not given.keys() - scalars.keys() - set(TensorArgs._fields)
    tensors = [given.get(name) for name in TensorArgs._fields]
    return [q, k, v, *tensors, *(given.get(name, value) for name, value in scalars.items())]
