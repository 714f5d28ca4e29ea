"""Recipes of the command `train`: one for each task, with its options. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

Option = tuple[str, type, str]
"""Option name, type and help text"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training recipe of one task."""

    kind: str
    help: str
    data: str
    """Help text of --data"""
    presets: tuple[str, ...]
    """Names in `training.PRESETS`; the first is the default"""
    model_options: tuple[Option, ...]
    """Options that set fields of the model's config"""
    task_options: tuple[Option, ...] = ()
    """Options that set fields of the task"""
    used_by: tuple[str, ...] = ()
    """Commands that use the checkpoint"""

    @property
    def out(self) -> str:
        return f"runs/{self.kind}"


_WIDTH: Option = ("width", int, "model width (embedding dimension)")
_VOCABULARY: Option = ("vocabulary", int, "number of tokens; byte pairs are merged up to this size")
_BLOCKS: tuple[Option, ...] = (
    _WIDTH,
    ("layers", int, "number of transformer blocks"),
    ("heads", int, "number of attention heads"),
    ("dropout", float, "dropout probability in training"),
)
_HIDDEN: Option = ("hidden", int, "hidden width of the feed-forward layers")
_HASHING: tuple[Option, ...] = (
    ("chunk", int, "tokens of a chunk, which sees itself and the chunk before"),
    ("rounds", int, "hash rounds of each attention"),
    ("hash-every", int, "one layer of so many hashes, the others see a window of two chunks"),
    ("scale", float, "factor of the scores (default: 1 / sqrt(head size))"),
)
_POSITIONS: tuple[Option, ...] = (
    ("positions", str, "learned: vectors added to the embedding; decay: heads that forget"),
    ("columns", int, "tokens of a row in the table of learned row and column encodings"),
)
_COPIES: tuple[Option, ...] = (
    ("context", int, "length of both copies, with a separator before each"),
    ("vocabulary", int, "number of different symbols, separator included"),
)

RECIPES = (
    Recipe(
        kind="generator",
        help="a byte-level transformer language model",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("nanogpt-cpu", "demo", "seed"),
        model_options=(("context", int, "context length in bytes"), *_BLOCKS),
        used_by=("generate", "evaluate"),
    ),
    Recipe(
        kind="gpt2",
        help="GPT-2 from scratch, with a byte-pair tokenizer trained on the same text",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        model_options=(("context", int, "context length in tokens"), _VOCABULARY, *_BLOCKS),
        used_by=("generate",),
    ),
    Recipe(
        kind="transformer-xl",
        help="Transformer-XL, a byte-level language model with memories of earlier segments",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "enwik8-base", "enwik8-large"),
        model_options=(
            ("context", int, "length of a segment in bytes"),
            ("memory", int, "number of bytes before a segment that are kept as memory, 0 for none"),
            *_BLOCKS,
            _HIDDEN,
        ),
        used_by=("generate", "evaluate"),
    ),
    Recipe(
        kind="sparse",
        help="Sparse Transformer, a byte-level language model with a long context",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "enwik8"),
        model_options=(
            ("context", int, "context length in bytes"),
            *_BLOCKS,
            ("pattern", str, "visible keys: local, strided or fixed"),
            ("stride", int, "the paper's l: size of a window or group of near keys"),
            ("summaries", int, "the paper's c: summary positions of a head in each group"),
            ("subblocks", int, "distinct summary positions of the heads"),
            ("combination", str, "merged: every head sees near and far keys; split: one of them"),
        ),
        used_by=("generate", "evaluate"),
    ),
    Recipe(
        kind="reformer",
        help="Reformer, a byte-level language model with a long context",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "enwik8"),
        model_options=(
            ("context", int, "context length in bytes"),
            ("columns", int, "bytes of a row in the table of row and column encodings"),
            *_BLOCKS,
            _HIDDEN,
            *_HASHING,
        ),
        used_by=("generate", "evaluate"),
    ),
    Recipe(
        kind="reformer-copy",
        help="a Reformer that copies a word of random symbols",
        data="none: words are drawn at random",
        presets=("demo",),
        model_options=(*_COPIES, *_BLOCKS, _HIDDEN, *_HASHING),
        used_by=("evaluate",),
    ),
    Recipe(
        kind="linear",
        help="Linear Transformer, a byte-level language model that generates as a recurrence",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "learned"),
        model_options=(
            ("context", int, "context length in bytes"),
            *_BLOCKS,
            _HIDDEN,
            *_POSITIONS,
        ),
        used_by=("generate", "evaluate"),
    ),
    Recipe(
        kind="linear-copy",
        help="a Linear Transformer that copies a word of random symbols",
        data="none: words are drawn at random",
        presets=("demo",),
        model_options=(*_COPIES, *_BLOCKS, _HIDDEN, *_POSITIONS),
        used_by=("evaluate",),
    ),
    Recipe(
        kind="classifier",
        help="a transformer text classifier",
        data="a folder of film reviews laid out as aclImdb (default: source snippets, each "
        "labelled by the part of Python's standard library it comes from)",
        presets=("demo", "seed"),
        model_options=(
            ("context", int, "maximum number of tokens of a text; longer texts are cut"),
            _VOCABULARY,
            *_BLOCKS,
        ),
        used_by=("classify",),
    ),
    Recipe(
        kind="translator",
        help="an encoder-decoder transformer for translation",
        data="a folder laid out as Multi30k, with train.de, train.en, val.de and val.en (default: "
        "numbers and dates, from words to figures and back)",
        presets=("demo", "base"),
        model_options=(
            ("context", int, "maximum number of tokens of a text"),
            *_BLOCKS,
            _HIDDEN,
        ),
        task_options=(
            ("smoothing", float, "label smoothing: probability mass given to all other tokens"),
        ),
        used_by=("translate",),
    ),
    Recipe(
        kind="bert",
        help="BERT, by masked-token and next-sentence prediction",
        data="training text, any file (default: the sources of Python's standard library)",
        presets=("demo", "bert-base", "bert-large"),
        model_options=(
            ("context", int, "maximum number of tokens of both segments together"),
            _VOCABULARY,
            *_BLOCKS,
            _HIDDEN,
        ),
    ),
    Recipe(
        kind="lookup",
        help="a learned lookup table: finds the fact that answers a question",
        data="a file with one fact per line: key, tab, value (default: the modules of Python's "
        "standard library and their descriptions)",
        presets=("demo",),
        model_options=(_WIDTH,),
        used_by=("lookup",),
    ),
)
