"""The backends, in the order in which backend="auto" tries them. They never import each other."""

from transformer_kernels.backends.base import FusedBackend
from transformer_kernels.backends.native.cpu import CpuBackend
from transformer_kernels.backends.native.cuda import CudaBackend
from transformer_kernels.backends.reference import ReferenceBackend
from transformer_kernels.backends.triton import TritonBackend

Backend = FusedBackend | ReferenceBackend

_TRITON, _REFERENCE = TritonBackend(), ReferenceBackend()
BACKENDS: tuple[Backend, ...] = (
    CpuBackend(),
    CudaBackend(),
    *((_REFERENCE, _TRITON) if _TRITON.is_interpreted else (_TRITON, _REFERENCE)),
)

__all__ = [
    "BACKENDS",
    "Backend",
    "CpuBackend",
    "CudaBackend",
    "FusedBackend",
    "ReferenceBackend",
    "TritonBackend",
]
