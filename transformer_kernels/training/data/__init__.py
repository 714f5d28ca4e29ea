"""Datasets of the reference models."""

from .copies import Copies
from .dataset import Batch, Dataset, LaneDataset
from .facts import Fact, Facts, as_facts, load_facts
from .labelled import LabelledTexts, label_texts, load_reviews, load_snippets, review_text
from .masking import IGNORE_INDEX, MaskedSentences
from .pairs import Pairs, load_pairs, pair_texts, spoken_pairs
from .text import (
    ByteLanes,
    ByteWindows,
    Corpus,
    TokenWindows,
    bytes_of,
    corpus_from_bytes,
    load_corpus,
    standard_library_text,
)
from .tokens import BEGIN, CLASS, END, MASK, PAD, SEPARATOR, SPECIAL, Tokens, train_tokens

__all__ = [
    "BEGIN",
    "CLASS",
    "END",
    "IGNORE_INDEX",
    "MASK",
    "PAD",
    "SEPARATOR",
    "SPECIAL",
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
    "label_texts",
    "load_corpus",
    "load_facts",
    "load_pairs",
    "load_reviews",
    "load_snippets",
    "pair_texts",
    "review_text",
    "spoken_pairs",
    "standard_library_text",
    "train_tokens",
]
