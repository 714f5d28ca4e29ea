"""Context parallelism: attention over sequences that are divided over processes (docs/scale.md)."""

from .attention import all_to_all_attention, ring_attention
from .context import ContextParallel, context_parallel
from .documents import shard_documents, unshard_documents
from .sequence import SequenceLayout, shard_sequence, unshard_sequence
from .varlen import ring_attention_varlen

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
