"""The backends, fastest first. They never import each other."""

from transformer_kernels.backends.base import Backend
from transformer_kernels.backends.cpu import CpuBackend
from transformer_kernels.backends.cuda import CudaBackend
from transformer_kernels.backends.reference import ReferenceBackend
from transformer_kernels.backends.triton import TritonBackend

_ON_GPUS, _ANYWHERE = TritonBackend(), ReferenceBackend()
BACKENDS: tuple[Backend, ...] = (
    CpuBackend(),
    CudaBackend(),
    *((_ANYWHERE, _ON_GPUS) if _ON_GPUS.is_interpreted else (_ON_GPUS, _ANYWHERE)),
)

__all__ = ["BACKENDS", "Backend", "CpuBackend", "CudaBackend", "TritonBackend"]
