"""Reference models, each in one file that opens with its config."""

from transformer_kernels.models.generator import SIZES, GeneratorConfig, TextGenerator

__all__ = ["SIZES", "GeneratorConfig", "TextGenerator"]
