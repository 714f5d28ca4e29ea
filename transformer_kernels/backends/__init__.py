"""The backends, fastest first. They never import each other."""

from transformer_kernels.backends.base import Backend
from transformer_kernels.backends.cpu import CpuBackend
from transformer_kernels.backends.reference import ReferenceBackend
from transformer_kernels.backends.triton import TritonBackend

BACKENDS: tuple[Backend, ...] = (CpuBackend(), TritonBackend(), ReferenceBackend())

__all__ = ["BACKENDS", "Backend", "CpuBackend", "TritonBackend"]
