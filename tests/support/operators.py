"""Recording of the operators that a call runs, from Python, compiled graphs or C++."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

FORWARD = "transformer_kernels::attention_forward"
BACKWARD = "transformer_kernels::attention_backward"


def operators_run_by(call: Callable[[], object]) -> Counter[str]:
    """Returns how often each operator ran during `call()`, by name ("aten::copy_")."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return Counter(event.name for event in profiler.events())
