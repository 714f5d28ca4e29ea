"""A transformer that tells which class a text belongs to.

Embeddings and learned positions, a stack of blocks, the mean over the text, and a projection to the
classes. Source: Transformers from scratch (P. Bloem, 2019), "Classification transformer"; there
padding is attended to and averaged, here it is neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from transformer_kernels.masks.mask import Mask
from transformer_kernels.nn.attention import HeadForm, head_size
from transformer_kernels.nn.blocks import Norm, Stack, TransformerBlock
from transformer_kernels.nn.options import (
    AttnImplementation,
    check_choice,
    check_positive,
    check_probability,
)
from transformer_kernels.nn.padding import check_lengths, clear_padding, mean_of_text
from transformer_kernels.nn.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """What decides the weights and the function of a `Classifier`."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    classes: int = 2
    context: int = 512
    dropout: float = 0.0
    norm: Norm = "post"
    form: HeadForm = "narrow"

    def __post_init__(self) -> None:
        check_positive("vocabulary", self.vocabulary)
        check_positive("layers", self.layers)
        check_positive("classes", self.classes)
        check_positive("context", self.context)
        head_size(self.width, self.heads, self.form)
        check_probability("dropout", self.dropout)
        check_choice("norm", self.norm, Norm)


SIZES = {
    "demo": ClassifierConfig(
        vocabulary=4096, layers=2, width=64, heads=4, context=256, dropout=0.1, norm="pre"
    ),
    "seed": ClassifierConfig(vocabulary=50_000, layers=6, width=128, heads=8, form="wide"),
}
"""By name: a small model that trains in minutes on two cores; and that of the source, for reviews
of films, whose width, heads and vocabulary are those of the experiment it links to. For other data
`dataclasses.replace` the vocabulary and the classes."""


class Classifier(nn.Module):
    """Log-probabilities of the classes of a text.

    `attn_implementation` selects how attention is computed, not its result: weights trained with
    one run with the others.
    """

    def __init__(
        self, config: ClassifierConfig, *, attn_implementation: AttnImplementation = "fused"
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = LearnedPositions(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(
            TransformerBlock(
                config.width,
                config.heads,
                norm=config.norm,
                form=config.form,
                dropout=config.dropout,
                attn_implementation=attn_implementation,
            )
            for _ in range(config.layers)
        )
        self.last_norm = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.classes = nn.Linear(config.width, config.classes)
        self._initialise()

    def _initialise(self) -> None:
        """Normal, deviation 0.02, biases 0: embeddings begin as large as the positions."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """tokens (B, T) int64, T up to the context, and how many of each row are its text, (B,),
        all by default -> log-probabilities (B, classes), natural log.

        The tokens behind a text are padding: any of the vocabulary, and they change nothing. A text
        of length 0 is allowed, its mean is 0: what the model says without having read.
        """
        B, T = tokens.shape
        check_lengths("lengths", lengths, batch=B, room=T)
        x: Tensor = self.dropout(self.positions(self.embedding(tokens)))
        x = clear_padding(x, lengths)
        x = self.blocks(x, mask=None if lengths is None else Mask.padding(lengths))
        x = mean_of_text(self.last_norm(x), lengths)
        return self.classes(x).log_softmax(dim=-1)  # type: ignore[no-any-return]
