"""Context parallelism: attention over sequences that are divided over processes (docs/scale.md)."""

from transformer_kernels.distributed.attention import all_to_all_attention, ring_attention
from transformer_kernels.distributed.sequence import (
    SequenceLayout,
    shard_sequence,
    unshard_sequence,
)

__all__ = [
    "SequenceLayout",
    "all_to_all_attention",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]
