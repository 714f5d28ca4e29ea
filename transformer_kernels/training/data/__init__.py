"""Datasets of the reference models."""

from transformer_kernels.training.data.copies import Copies
from transformer_kernels.training.data.corpus import (
    HELD_OUT,
    ByteWindows,
    Corpus,
    bytes_of,
    corpus_from_bytes,
    draw_batch,
    even_batch,
    load_corpus,
)
from transformer_kernels.training.data.dataset import Batch, Dataset
from transformer_kernels.training.data.facts import Fact, Facts, as_facts, load_facts
from transformer_kernels.training.data.labelled import LabelledTexts, label_texts
from transformer_kernels.training.data.lanes import ByteLanes, LaneDataset
from transformer_kernels.training.data.masking import IGNORE_INDEX, MaskedSentences
from transformer_kernels.training.data.pairs import Pairs, load_pairs, pair_texts, read_pairs
from transformer_kernels.training.data.reviews import load_reviews, review_text
from transformer_kernels.training.data.snippets import load_snippets
from transformer_kernels.training.data.spoken import spoken_pairs
from transformer_kernels.training.data.standard_library import (
    STANDARD_LIBRARY_BYTES,
    standard_library_text,
)
from transformer_kernels.training.data.token_windows import TokenWindows
from transformer_kernels.training.data.tokens import (
    BEGIN,
    CLASS,
    END,
    MASK,
    PAD,
    SEPARATOR,
    SPECIAL,
    Tokens,
    train_tokens,
)
from transformer_kernels.training.data.words import (
    date_to_words,
    number_to_words,
    words_to_date,
    words_to_number,
)

__all__ = [
    "BEGIN",
    "CLASS",
    "END",
    "HELD_OUT",
    "IGNORE_INDEX",
    "MASK",
    "PAD",
    "SEPARATOR",
    "SPECIAL",
    "STANDARD_LIBRARY_BYTES",
    "Batch",
    "ByteLanes",
    "ByteWindows",
    "Copies",
    "Corpus",
    "Dataset",
    "Fact",
    "Facts",
    "LabelledTexts",
    "LaneDataset",
    "MaskedSentences",
    "Pairs",
    "TokenWindows",
    "Tokens",
    "as_facts",
    "bytes_of",
    "corpus_from_bytes",
    "date_to_words",
    "draw_batch",
    "even_batch",
    "label_texts",
    "load_corpus",
    "load_facts",
    "load_pairs",
    "load_reviews",
    "load_snippets",
    "number_to_words",
    "pair_texts",
    "read_pairs",
    "review_text",
    "spoken_pairs",
    "standard_library_text",
    "train_tokens",
    "words_to_date",
    "words_to_number",
]
