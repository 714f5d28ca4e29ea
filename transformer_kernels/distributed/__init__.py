"""Context parallelism: attention over sequences that are divided over processes (docs/scale.md)."""

from transformer_kernels.distributed.attention import all_to_all_attention, ring_attention
from transformer_kernels.distributed.context import ContextParallel, context_parallel
from transformer_kernels.distributed.documents import shard_documents, unshard_documents
from transformer_kernels.distributed.sequence import (
    SequenceLayout,
    shard_sequence,
    unshard_sequence,
)
from transformer_kernels.distributed.varlen import ring_attention_varlen

__all__ = [
    "ContextParallel",
    "SequenceLayout",
    "all_to_all_attention",
    "context_parallel",
    "ring_attention",
    "ring_attention_varlen",
    "shard_documents",
    "shard_sequence",
    "unshard_documents",
    "unshard_sequence",
]
