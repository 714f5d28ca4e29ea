"""The backends, in the order in which backend="auto" tries them. They never import each other."""

from .base import FusedBackend
from .native.cpu import CpuBackend
from .native.cuda import CudaBackend
from .reference import ReferenceBackend
from .triton import TritonBackend

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
