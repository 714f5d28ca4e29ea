"""Devices on which `enable` replaces torch's attention."""

from __future__ import annotations

from ..backends import CudaBackend, TritonBackend

REPLACED = {"cpu"}
"""Types of these devices: those with fused kernels that can run on this machine. torch has fused
kernels for more GPUs than this package; on the others its attention stays."""


def find() -> None:
    """Adds "cuda" to `REPLACED` if a CUDA device can run our kernels."""
    if any(backend.unavailable_reason() is None for backend in (CudaBackend(), TritonBackend())):
        REPLACED.add("cuda")
