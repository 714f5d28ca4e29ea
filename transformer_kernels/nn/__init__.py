"""Transformer building blocks for the reference models, built on the attention operator."""

from transformer_kernels.nn.attention import (
    HeadForm,
    MultiHeadAttention,
    Scaling,
    attend,
    basic_self_attention,
    divide_by_fourth_root,
)
from transformer_kernels.nn.blocks import (
    Activation,
    DecoderBlock,
    FeedForward,
    Norm,
    SelfAttentionBlock,
    Stack,
    TransformerBlock,
    recompute_blocks,
)
from transformer_kernels.nn.cache import KVCache, LayerCache
from transformer_kernels.nn.initial import normal_weights, smaller_branch_ends
from transformer_kernels.nn.linear_attention import LinearImplementation, LinearSelfAttention
from transformer_kernels.nn.lsh_attention import lsh_attention
from transformer_kernels.nn.lsh_hashing import default_buckets, hash_buckets, sorted_by_bucket
from transformer_kernels.nn.mask_buffer import MaskBuffer
from transformer_kernels.nn.options import AttnImplementation
from transformer_kernels.nn.positions import (
    LearnedPositions,
    RowColumnPositions,
    SinusoidalPositions,
    distance_sinusoids,
    sinusoids,
)
from transformer_kernels.nn.reformer_blocks import LocalBlock, LSHAttention, ReformerBlock
from transformer_kernels.nn.relative_attention import (
    RelativeAttention,
    RelativeBlock,
)
from transformer_kernels.nn.relative_positions import BucketedBias, distance_buckets
from transformer_kernels.nn.reversible import ReversibleBlock, ReversibleStack
from transformer_kernels.nn.sparse_attention import sparse_attention
from transformer_kernels.nn.sparse_blocks import SparseAttention, SparseBlock
from transformer_kernels.nn.sparse_patterns import Combination, PatternKind, SparsePattern
from transformer_kernels.nn.t5_blocks import T5Activation, T5Attention, T5Block, T5FeedForward

__all__ = [
    "Activation",
    "AttnImplementation",
    "BucketedBias",
    "Combination",
    "DecoderBlock",
    "FeedForward",
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
