"""The backends, fastest first. They never import each other."""

from transformer_kernels.backends.base import Backend
from transformer_kernels.backends.cpu import CpuBackend
from transformer_kernels.backends.reference import ReferenceBackend

BACKENDS: tuple[Backend, ...] = (CpuBackend(), ReferenceBackend())

__all__ = ["BACKENDS", "Backend", "CpuBackend"]
