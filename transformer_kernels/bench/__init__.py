"""Measurement core of `bench`, the demo and benchmarks/: cases, variants, time, memory, error."""

from .accuracy import Outputs, exact_outputs, run_once
from .cases import Attend, Case, Direction, Inputs
from .memory import memory_can_be_measured, peak_extra_bytes
from .provenance import Provenance, device_slug
from .rows import Row, append_rows, make_row, read_rows, write_rows
from .timer import Budget, Clock, Interleaver, Ratio, Timing, clock_for
from .variants import VARIANTS, Variant, usable_variants
from .workload import prepare_work

__all__ = [
    "VARIANTS",
    "Attend",
    "Budget",
    "Case",
    "Clock",
    "Direction",
    "Inputs",
    "Interleaver",
    "Outputs",
    "Provenance",
    "Ratio",
    "Row",
    "Timing",
    "Variant",
    "append_rows",
    "clock_for",
    "device_slug",
    "exact_outputs",
    "make_row",
    "memory_can_be_measured",
    "peak_extra_bytes",
    "prepare_work",
    "read_rows",
    "run_once",
    "usable_variants",
    "write_rows",
]
