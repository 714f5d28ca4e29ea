"""Building blocks of the reference models; attention runs through the operator."""

from transformer_kernels.nn.attention import (
    AttentionPath,
    HeadForm,
    MultiHeadAttention,
    Scaling,
    attend,
    basic_self_attention,
    divide_by_fourth_root,
)
from transformer_kernels.nn.blocks import Activation, FeedForward, Norm, TransformerBlock
from transformer_kernels.nn.positions import LearnedPositions, SinusoidalPositions, sinusoids

__all__ = [
    "Activation",
    "AttentionPath",
    "FeedForward",
    "HeadForm",
    "LearnedPositions",
    "MultiHeadAttention",
    "Norm",
    "Scaling",
    "SinusoidalPositions",
    "TransformerBlock",
    "attend",
    "basic_self_attention",
    "divide_by_fourth_root",
    "sinusoids",
]
