"""Small models of every kind, for the tests that all models pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from transformer_kernels import models
from transformer_kernels.nn import AttnImplementation, LinearImplementation

IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
LENGTHS = torch.tensor([9, 1, 4])
VOCABULARY = 17

Run = Callable[[Any, Tensor], Tensor]
Rows = Callable[[Any, Tensor, Tensor | None, Sequence[int]], list[Tensor]]
Parts = Callable[[Any, Tensor, Sequence[int]], Tensor]


def tokens(length: int = 9, batch: int = 3, seed: int = 1) -> Tensor:
    """Random tokens from 1 on, which leaves 0 for padding."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=draws)


TARGET = tokens(7, seed=2)


@dataclass(frozen=True)
class Entry:
    """A small model, and how it is called."""

    label: str
    kind: Callable[..., nn.Module]
    config: Any
    run: Run
    """Differentiable results for a text (B, T)."""
    more: tuple[Any, ...] = ()
    """Arguments of the model behind the config."""
    implementations: tuple[AttnImplementation, ...] = IMPLEMENTATIONS
    lengths: tuple[int, ...] = (9,)
    """Lengths of the texts on which the implementations are compared."""
    causal: Run | None = None
    """Logits (B, T, vocabulary) of a text that is predicted token by token."""
    parts: Parts | None = None
    """The same for a text that is read in parts of given lengths, with a cache or a state."""
    rows: Rows | None = None
    """Results for each row of a padded batch, which may not depend on the padding."""
    poisoned: str | None = None
    """Embedding of the padded text alone, whose row 0 may be NaN."""
    dropouts: int = 0
    """Number of times that an element-wise dropout applies, with `dropout` in the config."""
    drops_weights: bool = True
    """True if `dropout` in the config applies to attention weights, too."""

    def __str__(self) -> str:
        return self.label

    def build(self, implementation: AttnImplementation = "fused", **changes: Any) -> Any:
        """A model in float64 with large weights: the attention of a new one is almost uniform."""
        config = replace(self.config, **changes)
        model = self.kind(config, *self.more, attn_implementation=implementation).double()
        draws = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draws))
        return model


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, dtype=torch.float64)


def result_and_gradients(o: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """o, and the gradients of the inputs for a random gradient of o."""
    return o.detach(), *torch.autograd.grad(o, inputs, randn(*o.shape, seed=9).to(o.dtype))


def saved_sizes(call: Callable[[], object]) -> list[int]:
    """Numbers of elements of the tensors that autograd saves in a call."""
    sizes: list[int] = []

    def save(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        call()
    return sizes


def combination(*results: Tensor) -> Tensor:
    """A fixed random combination of all elements, as a loss."""
    draws, total = torch.Generator().manual_seed(4), torch.zeros(())
    for x in results:
        total = total + (x * torch.randn(x.shape, generator=draws).to(x)).sum()
    return total


def gradients(model: nn.Module, *results: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a combination of the results in every parameter."""
    of = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(combination(*results), of, materialize_grads=True)


def by_cache(model: Any, text: Tensor, counts: Sequence[int]) -> Tensor:
    cache = model.new_cache(len(text))
    return torch.cat([model(part, cache=cache) for part in text.split([*counts], dim=1)], dim=1)


def by_state(model: Any, text: Tensor, counts: Sequence[int]) -> Tensor:
    state, results = model.new_state(len(text)), []
    for part in text.split([*counts], dim=1):
        logits, state = model(part, state)
        results.append(logits)
    return torch.cat(results, dim=1)


def by_segments(model: Any, text: Tensor) -> Tensor:
    """Logits of a text that is read in segments of 5."""
    count = text.shape[1]
    return by_state(model, text, [5] * (count // 5) + [count % 5] * (count % 5 > 0))


def by_decoder_cache(model: Any, text: Tensor, counts: Sequence[int]) -> Tensor:
    memory, cache = model.memory(tokens(), LENGTHS), model.new_cache(len(text), text.shape[1])
    with torch.no_grad():
        parts = [model.decode(part, memory, cache=cache) for part in text.split([*counts], dim=1)]
    return torch.cat(parts, dim=1)


def counts_of(text: Tensor, lengths: Tensor | None) -> list[int]:
    """Number of tokens of each row."""
    return [text.shape[1]] * len(text) if lengths is None else lengths.tolist()


def pre_training_rows(
    model: Any, text: Tensor, lengths: Tensor | None, _: Sequence[int]
) -> list[Tensor]:
    logits = model(text, lengths=lengths)
    return [
        torch.cat([logits.tokens[b, :n].flatten(), logits.next_sentence[b]])
        for b, n in enumerate(counts_of(text, lengths))
    ]


def encoder_rows(
    model: Any, text: Tensor, lengths: Tensor | None, _: Sequence[int]
) -> list[Tensor]:
    x, counts = model(text, lengths=lengths), counts_of(text, lengths)
    return [torch.cat([x[b, :n], model.pooled(x)[b : b + 1]]) for b, n in enumerate(counts)]


ENCODER_DECODER: dict[str, Any] = {
    "run": lambda model, text: model(text, TARGET[: len(text)]),
    "causal": lambda model, text: model(tokens(), text, LENGTHS),
    "parts": by_decoder_cache,
    "rows": lambda model, text, lengths, of: [*model(text, TARGET[[*of]], lengths)],
}
WITH_CACHE: dict[str, Any] = {
    "run": lambda model, text: model(text),
    "causal": lambda model, text: model(text),
    "parts": by_cache,
}
RECURRENT: dict[str, Any] = {
    "run": lambda model, text: model(text),
    "causal": lambda model, text: model(text),
    "parts": by_state,
    "implementations": get_args(LinearImplementation),
    "lengths": (1, 12, 150),
    "dropouts": 5,
    "drops_weights": False,
}
POOLED: dict[str, Any] = {
    "run": lambda model, text: model(text),
    "rows": lambda model, text, lengths, _: [*model(text, lengths=lengths)],
}

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16}
BERT = models.BertConfig(
    **SIZES, hidden=24, vocabulary=VOCABULARY, context=9, segments=3, dropout=0.0
)
SPARSE = models.SparseTransformerConfig(
    layers=2, heads=4, width=16, vocabulary=VOCABULARY, context=12, stride=4, subblocks=2
)
REFORMER = models.ReformerConfig(
    **SIZES, vocabulary=VOCABULARY, context=12, columns=4, chunk=4, rounds=2
)
LINEAR = models.LinearTransformerConfig(**SIZES, vocabulary=VOCABULARY, context=12)
DELTA = models.GatedDeltaNetConfig(
    **SIZES, hidden=20, vocabulary=VOCABULARY, context=12, attention_every=2
)
XL = models.TransformerXLConfig(
    layers=2, heads=2, width=10, head_size=7, hidden=13, vocabulary=VOCABULARY,
    context=5, memory=40, dropout=0.0,
)  # fmt: skip
TRANSLATOR = models.TranslatorConfig(
    **SIZES, source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY, hidden=20, context=21,
    dropout=0.0,
)  # fmt: skip
T5_CONFIG = models.T5Config(
    layers=2, decoder_layers=3, heads=3, width=10, head_size=5, hidden=14, vocabulary=VOCABULARY,
    buckets=6, max_distance=5, dropout=0.0,
)  # fmt: skip
"""Distances beyond max_distance occur in texts of 7 tokens."""
T5_V1_1 = replace(T5_CONFIG, activation="gated_gelu", tied_embeddings=False)


def _sparse(name: str, **changes: Any) -> Entry:
    return Entry(
        f"sparse-{name}", models.SparseTransformer, config=replace(SPARSE, **changes),
        **WITH_CACHE, lengths=(1, 12, 30), dropouts=5, drops_weights=False,
    )  # fmt: skip


def _reformer(name: str, **changes: Any) -> Entry:
    config = replace(REFORMER, **changes)
    return Entry(
        f"reformer{name}", models.Reformer, config=config, run=lambda model, text: model(text),
        lengths=(1, 12, 30), dropouts=1 + 2 * config.layers, drops_weights=False,
    )  # fmt: skip


def _linear(name: str, **changes: Any) -> Entry:
    return Entry(
        f"linear-{name}", models.LinearTransformer, config=replace(LINEAR, **changes), **RECURRENT
    )


ENTRIES = (
    Entry(
        "gpt2", models.GPT2, **WITH_CACHE, dropouts=5,
        config=models.GPT2Config(**SIZES, vocabulary=VOCABULARY, context=12, dropout=0.0),
    ),
    Entry(
        "generator", models.TextGenerator, **WITH_CACHE, dropouts=5,
        config=models.GeneratorConfig(
            **SIZES, context=12, norm="pre", form="narrow", activation="gelu"
        ),
    ),
    Entry(
        "generator-post-wide", models.TextGenerator, **WITH_CACHE, dropouts=5,
        config=models.GeneratorConfig(**SIZES, context=12, norm="post", form="wide"),
    ),
    _sparse("local", pattern="local"),
    _sparse("strided", pattern="strided"),
    _sparse("strided-split", pattern="strided", combination="split"),
    _sparse("fixed"),
    _sparse("fixed-split", combination="split"),
    _reformer(""),
    _reformer("-mixed", layers=4, hash_every=2),
    _reformer("-scale", scale=1.0),
    _linear("learned"),
    _linear("columns", columns=4, hidden=20),
    _linear("decay", positions="decay"),
    Entry("gated-deltanet", models.GatedDeltaNet, config=DELTA, **RECURRENT),
    Entry(
        "xl", models.TransformerXL, config=XL, run=by_segments, causal=by_segments,
        parts=by_state, lengths=(1, 15), dropouts=9,
        drops_weights=False,
    ),
    Entry(
        "xl-pre", models.TransformerXL, config=replace(XL, norm="pre", tied_biases=False),
        run=by_segments, causal=by_segments, parts=by_state, lengths=(1, 15), dropouts=9,
        drops_weights=False,
    ),
    Entry(
        "classifier", models.Classifier, **POOLED, poisoned="embedding.weight", dropouts=5,
        config=models.ClassifierConfig(**SIZES, vocabulary=VOCABULARY, classes=3, context=9),
    ),
    Entry(
        "classifier-pre-wide", models.Classifier, **POOLED, poisoned="embedding.weight",
        config=models.ClassifierConfig(
            **SIZES, vocabulary=VOCABULARY, classes=3, context=9, norm="pre", form="wide"
        ),
        dropouts=5,
    ),
    Entry(
        "bert", models.Bert, config=BERT, run=lambda model, text: model(text),
        rows=encoder_rows, poisoned="embedding.weight", dropouts=5,
    ),
    Entry(
        "bert-pre-training", models.BertForPreTraining, config=BERT, rows=pre_training_rows,
        run=lambda model, text: torch.cat([x.flatten() for x in model(text)]), dropouts=5,
    ),
    Entry(
        "bert-classification", models.BertForClassification, config=BERT, more=(4,), **POOLED,
        poisoned="encoder.embedding.weight", dropouts=6,
    ),
    Entry("translator", models.Translator, TRANSLATOR, **ENCODER_DECODER, dropouts=12),
    Entry(
        "translator-pre-apart", models.Translator, **ENCODER_DECODER, dropouts=12,
        config=replace(TRANSLATOR, norm="pre", shared=False), poisoned="source_embedding.weight",
    ),
    Entry("t5", models.T5, T5_CONFIG, **ENCODER_DECODER, dropouts=22),
    Entry(
        "t5-v1.1", models.T5, T5_V1_1, **ENCODER_DECODER, poisoned="embedding.weight", dropouts=22,
    ),
    Entry(
        "lookup", models.Lookup, **POOLED, poisoned="embedding.weight",
        config=models.LookupConfig(vocabulary=VOCABULARY, rows=5, width=8),
    ),
)  # fmt: skip
ENCODER_DECODERS = [entry for entry in ENTRIES if entry.kind in (models.Translator, models.T5)]


def entry_of(name: str) -> Entry:
    """The entry of a name."""
    (entry,) = (entry for entry in ENTRIES if entry.label == name)
    return entry
