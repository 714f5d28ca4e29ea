"""Measurement core of the demo and of benchmarks/: cases, variants, time, peak memory, error."""

from transformer_kernels.bench.accuracy import Outputs, exact_outputs, run_once
from transformer_kernels.bench.cases import Attend, Case, Direction, Inputs
from transformer_kernels.bench.clocks import Clock, clock_for
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.provenance import Provenance, device_slug
from transformer_kernels.bench.rows import Row, append_rows, make_row, read_rows, write_rows
from transformer_kernels.bench.timer import Budget, Interleaver, Ratio, Timing
from transformer_kernels.bench.variants import VARIANTS, Variant, usable_variants
from transformer_kernels.bench.workload import prepare_work

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
