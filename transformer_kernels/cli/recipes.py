"""What `train` can train, as its options say it; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

Setting = tuple[str, type, str]
"""The option's name, what is read, and what it means"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One kind of task."""

    kind: str
    help: str
    data: str
    """What --data is"""
    presets: tuple[str, ...]
    """Names in `training.PRESETS`, the default first"""
    model_settings: tuple[Setting, ...]
    """Fields of the model's config"""
    task_settings: tuple[Setting, ...] = ()
    """Fields of the task"""
    uses: tuple[str, ...] = ()
    """Commands that take the checkpoint"""

    @property
    def out(self) -> str:
        return f"runs/{self.kind}"


_WIDTH: Setting = ("width", int, "width of the model")
_VOCABULARY: Setting = ("vocabulary", int, "byte pairs are merged until there are so many tokens")
_BLOCKS: tuple[Setting, ...] = (
    _WIDTH,
    ("layers", int, "transformer blocks"),
    ("heads", int, "attention heads"),
    ("dropout", float, "share of values dropped in training"),
)

TRAININGS = (
    Training(
        kind="generator",
        help="a transformer that writes text, byte by byte",
        data="text to learn, any file (default: the sources of Python's standard library)",
        presets=("nanogpt-cpu", "demo", "seed"),
        model_settings=(("context", int, "bytes in a window"), *_BLOCKS),
        uses=("generate",),
    ),
    Training(
        kind="gpt2",
        help="GPT-2, from the start, on tokens trained on the same text",
        data="text to learn, any file (default: the sources of Python's standard library)",
        presets=("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        model_settings=(("context", int, "tokens in a window"), _VOCABULARY, *_BLOCKS),
        uses=("generate",),
    ),
    Training(
        kind="classifier",
        help="a transformer that tells which class a text belongs to",
        data="a folder like aclImdb, film reviews (default: snippets of Python's standard library, "
        "which are to be told by what part of it they come from)",
        presets=("demo", "seed"),
        model_settings=(("context", int, "tokens of a text that are read"), _VOCABULARY, *_BLOCKS),
        uses=("classify",),
    ),
    Training(
        kind="translator",
        help="an encoder-decoder transformer that translates",
        data="a folder like Multi30k, with train.de, train.en, val.de and val.en (default: numbers "
        "and dates, from words to figures and back)",
        presets=("demo", "base"),
        model_settings=(
            ("context", int, "tokens of a text at most"),
            *_BLOCKS,
            ("hidden", int, "width between the layers of a feed-forward"),
        ),
        task_settings=(("smoothing", float, "share of a target's weight for all other tokens"),),
        uses=("translate",),
    ),
    Training(
        kind="bert",
        help="BERT's pre-training: masked tokens, and whether one text follows another",
        data="text to learn, any file (default: the sources of Python's standard library)",
        presets=("demo", "bert-base", "bert-large"),
        model_settings=(
            ("context", int, "tokens of both texts"),
            _VOCABULARY,
            *_BLOCKS,
            ("hidden", int, "width between the layers of a feed-forward"),
        ),
    ),
    Training(
        kind="lookup",
        help="a table of facts that is asked in words",
        data="lines of a key and a value, with a tab between (default: the modules of Python's "
        "standard library, and what each is for)",
        presets=("demo",),
        model_settings=(_WIDTH,),
        uses=("lookup",),
    ),
)
