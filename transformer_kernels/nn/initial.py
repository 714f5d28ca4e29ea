"""Weights that a model starts from."""

from __future__ import annotations

from torch import nn

STD = 0.02
"""Of GPT-2 and of BERT."""


def normal_weights(model: nn.Module) -> None:
    """Linear layers and embeddings: normal with deviation 0.02, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def smaller_branch_ends(model: nn.Module, *, layers: int) -> None:
    """Weights that end a residual branch: deviation 0.02 / sqrt(2 layers), so that the sum over the
    branches does not grow with depth. Source: GPT-2."""
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.out_proj.weight", "feed_forward.down_proj.weight")):
            nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5)
