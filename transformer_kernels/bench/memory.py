"""Peak memory of a workload, counted by the operating system (CPU) or by torch's allocator (CUDA).

On the CPU, Linux's peak resident set size is reset before the workload and read after it. It counts
every touched allocation: torch's allocator, workspaces of kernels and buffers of libraries. A
counter inside torch would miss the last two. Memory in use before, such as the inputs, is not
counted. Free memory cached by the C library and by our kernels is first returned to the system, so
that its reuse counts too. The resolution is a page; Python itself adds noise of a few hundred KiB.
In a process that has allocated and freed much, a block can lie in a gap of the heap. It then stays
resident when it is freed, and counts on: exact figures need a new process.

On a CUDA device every measured library allocates from torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from pathlib import Path

import torch

from ..backends.native import extension
from .cases import Case
from .provenance import CPU
from .workload import Prepare

NAIVE_MATRICES = 5
"""(M, N) score matrices that naive attention holds in a training step, with a margin"""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""See proc(5): resets the peak resident set size to the current value."""


@cache
def memory_can_be_measured() -> bool:
    """Returns True if the system has a peak resident set size that can be reset (Linux)."""
    try:
        _reset_peak()
        _resident("VmHWM")
    except (OSError, LookupError):
        return False
    return True


def peak_extra_bytes(prepare: Prepare, device: torch.device = CPU) -> int | None:
    """Returns the peak memory of a workload in bytes, beyond the memory in use after its set-up.

    Outputs and gradients count, inputs do not. A warm-up run first creates thread pools and library
    caches.

    Args:
        prepare: set-up of the workload.
        device: device of its tensors.

    Returns:
        Bytes, or None if the system cannot measure it.
    """
    if device.type != "cuda" and not memory_can_be_measured():
        return None
    prepare()()
    workload = prepare()
    gc.collect()
    before = _start(device)
    result = workload()
    peak = _peak(device)
    del result
    return max(0, peak - before)


def _start(device: torch.device) -> int:
    """Resets the peak. Returns the bytes in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    extension.release_workspace()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _reset_peak()
    return _resident("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM")


def available_bytes() -> int | None:
    """Returns the bytes that can be allocated without swapping, or None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    return _kibibytes(text, "MemAvailable") * 1024


def too_large_reason(case: Case) -> str | None:
    """Reason why naive attention exceeds the free memory of its device; None if it fits."""
    needed = NAIVE_MATRICES * case.B * case.H_q * case.M * case.N * case.dtype.itemsize
    on_cuda = case.device.type == "cuda"
    available = torch.cuda.mem_get_info(case.device)[0] if on_cuda else available_bytes()
    if available is None or needed < available:
        return None
    return f"naive attention needs {needed / 2**30:.1f} GiB, more than the free memory"


def _reset_peak() -> None:
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def _resident(field: str) -> int:
    return _kibibytes(_STATUS.read_text(encoding="ascii", errors="replace"), field) * 1024


def _kibibytes(text: str, field: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise LookupError(f"no {field} in {text[:80]!r}...")
