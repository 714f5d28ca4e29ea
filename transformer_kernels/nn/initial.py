"""Weight initialisation."""

from __future__ import annotations

from torch import nn

STD = 0.02
"""Standard deviation of the initial weights of GPT-2 and BERT."""


def normal_weights(model: nn.Module) -> None:
    """Draws linear and embedding weights from N(0, 0.02²), and sets biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def smaller_branch_ends(model: nn.Module, *, layers: int) -> None:
    """Draws the output projections of residual branches with deviation 0.02 / sqrt(2 * layers).

    The variance of the residual sum then does not grow with depth. Source: GPT-2.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.out_proj.weight", "feed_forward.down_proj.weight")):
            nn.init.normal_(parameter, std=STD / (2 * layers) ** 0.5)
