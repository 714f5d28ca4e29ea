"""One validated call. Every error that a caller can make is raised here, before any launch."""

from transformer_kernels.problem.types import (
    AttentionProblem,
    KVCache,
    SavedForBackward,
    TensorArgs,
)

__all__ = ["AttentionProblem", "KVCache", "SavedForBackward", "TensorArgs"]
