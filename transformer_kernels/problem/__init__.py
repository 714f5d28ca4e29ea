"""Validated calls. Every error of a caller is raised here, before any kernel is launched."""

from transformer_kernels.problem.types import (
    AttentionProblem,
    KVCache,
    SavedForBackward,
    TensorArgs,
)

__all__ = ["AttentionProblem", "KVCache", "SavedForBackward", "TensorArgs"]
