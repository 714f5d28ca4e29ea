"""One validated call. Every error that a caller can make is raised here, before any launch."""

from transformer_kernels.problem.types import AttentionProblem, Extras, KeyCache, SavedForBackward

__all__ = ["AttentionProblem", "Extras", "KeyCache", "SavedForBackward"]
