"""Peak memory of a piece of work: on the CPU as the operating system counts it, on a CUDA device as
torch's allocator does.

On the CPU the kernel's own high-water mark of resident memory is reset before the work and read
after it. That sees every allocation that was touched, whoever made it: torch's allocator, a
kernel's scratch space, a library's buffers. A counter inside torch would miss the last two. What
the process held before, the inputs among it, is not counted; free memory that the C library and our
kernels keep is given back first, so that reusing it counts as well. Linux only; the resolution is a
page, and a few hundred KiB of the interpreter's own come and go.

On a CUDA device torch's allocator is where every library that is measured gets its memory from.
"""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from pathlib import Path

import torch

from transformer_kernels.backends.native import extension
from transformer_kernels.bench.provenance import CPU
from transformer_kernels.bench.workload import Prepare

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""See proc(5): resets the peak resident set size to the current value."""


@cache
def memory_can_be_measured() -> bool:
    """Whether this system has a high-water mark that can be reset."""
    try:
        _reset_peak()
        _resident("VmHWM")
    except (OSError, LookupError):
        return False
    return True


def peak_extra_bytes(prepare: Prepare, device: torch.device = CPU) -> int | None:
    """The most that the work held at once, beyond what was there after its set-up.

    Outputs and gradients count, inputs do not. The work runs once before, so that thread pools and
    caches of libraries exist. `device` is where its tensors lie. None where the system cannot tell.
    """
    if device.type == "cuda":
        return _peak_on_cuda(prepare, device)
    if not memory_can_be_measured():
        return None
    prepare()()
    work = prepare()
    gc.collect()
    _return_free_memory()
    _reset_peak()
    before = _resident("VmRSS")
    result = work()
    peak = _resident("VmHWM")
    del result
    return max(0, peak - before)


def _peak_on_cuda(prepare: Prepare, device: torch.device) -> int:
    prepare()()
    work = prepare()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak - before


def available_bytes() -> int | None:
    """Memory that new allocations can use without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    return _kibibytes(text, "MemAvailable") * 1024


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


def _return_free_memory() -> None:
    """Hands free memory back to the system: what our kernels keep, and what glibc does."""
    extension.release_workspace()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
