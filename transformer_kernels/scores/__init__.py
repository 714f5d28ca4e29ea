"""Score options: bias by position, sinks and dropout bits."""

from transformer_kernels.scores.alibi import Alibi, alibi, alibi_slopes

__all__ = ["Alibi", "alibi", "alibi_slopes"]
