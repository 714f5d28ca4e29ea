"""Which operators a call really runs, whoever calls them: Python, compiled code, or C++."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

FORWARD = "transformer_kernels::attention_forward"
BACKWARD = "transformer_kernels::attention_backward"


def operators_run_by(call: Callable[[], object]) -> Counter[str]:
    """How often each operator ran while `call()` did, by name ("aten::copy_")."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return Counter(event.name for event in profiler.events())
