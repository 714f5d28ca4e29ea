"""Transformer building blocks for the reference models, built on the attention operator."""

from .attention import (
    HeadForm,
    KVCache,
    LayerCache,
    MultiHeadAttention,
    Scaling,
    attend,
    basic_self_attention,
    divide_by_fourth_root,
)
from .blocks import (
    Activation,
    DecoderBlock,
    FeedForward,
    Norm,
    SelfAttentionBlock,
    Stack,
    TransformerBlock,
    normal_weights,
    recompute_blocks,
    smaller_branch_ends,
)
from .delta_attention import DeltaState, GatedDeltaRuleAttention
from .linear_attention import LinearImplementation, LinearSelfAttention
from .lsh_attention import default_buckets, hash_buckets, lsh_attention, sorted_by_bucket
from .masking import MaskBuffer
from .options import AttnImplementation
from .positions import (
    LearnedPositions,
    RowColumnPositions,
    SinusoidalPositions,
    distance_sinusoids,
    sinusoids,
)
from .reformer_blocks import (
    LocalBlock,
    LSHAttention,
    ReformerBlock,
    ReversibleBlock,
    ReversibleStack,
)
from .relative_attention import RelativeAttention, RelativeBlock
from .sparse_attention import (
    Combination,
    PatternKind,
    SparseAttention,
    SparseBlock,
    SparsePattern,
    sparse_attention,
)
from .t5_blocks import (
    BucketedBias,
    T5Activation,
    T5Attention,
    T5Block,
    T5FeedForward,
    distance_buckets,
)

__all__ = [
    "Activation",
    "AttnImplementation",
    "BucketedBias",
    "Combination",
    "DecoderBlock",
    "DeltaState",
    "FeedForward",
    "GatedDeltaRuleAttention",
    "HeadForm",
    "KVCache",
    "LSHAttention",
    "LayerCache",
    "LearnedPositions",
    "LinearImplementation",
    "LinearSelfAttention",
    "LocalBlock",
    "MaskBuffer",
    "MultiHeadAttention",
    "Norm",
    "PatternKind",
    "ReformerBlock",
    "RelativeAttention",
    "RelativeBlock",
    "ReversibleBlock",
    "ReversibleStack",
    "RowColumnPositions",
    "Scaling",
    "SelfAttentionBlock",
    "SinusoidalPositions",
    "SparseAttention",
    "SparseBlock",
    "SparsePattern",
    "Stack",
    "T5Activation",
    "T5Attention",
    "T5Block",
    "T5FeedForward",
    "TransformerBlock",
    "attend",
    "basic_self_attention",
    "default_buckets",
    "distance_buckets",
    "distance_sinusoids",
    "divide_by_fourth_root",
    "hash_buckets",
    "lsh_attention",
    "normal_weights",
    "recompute_blocks",
    "sinusoids",
    "smaller_branch_ends",
    "sorted_by_bucket",
    "sparse_attention",
]
