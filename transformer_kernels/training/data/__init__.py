"""Datasets of the reference models."""

from .copies import Copies
from .corpus import (
    HELD_OUT,
    ByteWindows,
    Corpus,
    bytes_of,
    corpus_from_bytes,
    draw_batch,
    even_batch,
    load_corpus,
)
from .dataset import Batch, Dataset
from .facts import Fact, Facts, as_facts, load_facts
from .labelled import LabelledTexts, label_texts
from .lanes import ByteLanes, LaneDataset
from .masking import IGNORE_INDEX, MaskedSentences
from .pairs import Pairs, load_pairs, pair_texts, read_pairs
from .reviews import load_reviews, review_text
from .snippets import load_snippets
from .spoken import spoken_pairs
from .standard_library import STANDARD_LIBRARY_BYTES, standard_library_text
from .token_windows import TokenWindows
from .tokens import BEGIN, CLASS, END, MASK, PAD, SEPARATOR, SPECIAL, Tokens, train_tokens
from .words import date_to_words, number_to_words, words_to_date, words_to_number

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
