"""Dataset of text pairs for translation, from two files per language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...nn.options import check_positive
from .dataset import Batch, digest_of, evenly_spaced
from .ragged_tokens import RaggedTokens
from .tokens import BEGIN, END, Tokens, train_tokens

TextPair = tuple[str, str]
"""Source text and target text"""


@dataclass(frozen=True)
class Pairs:
    """Dataset of source and target texts with a shared tokenizer.

    {"source": (B, S), "source_lengths": (B,), "target": (B, T), "target_lengths": (B,)}.

    A target is BEGIN, its text and END, all included in its length. A source is only its text.
    """

    name: str
    source: str | None
    digest: str
    tokens: Tokens
    train: tuple[RaggedTokens, RaggedTokens]
    """Sources and targets, one row of each per pair"""
    validation: tuple[RaggedTokens, RaggedTokens]
    skipped: int
    """Number of pairs that were skipped because a side is empty or too long"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        pairs = torch.randint(len(self.train[0]), (count,), generator=generator)
        return _batch(self.train, pairs)

    def held_out(self, count: int) -> Batch:
        return _batch(self.validation, evenly_spaced(len(self.validation[0]), count))


def load_pairs(
    folder: Path | str,
    *,
    languages: tuple[str, str] = ("de", "en"),
    vocabulary: int = 8000,
    tokens: Tokens | None = None,
    longest: int = 256,
) -> Pairs:
    """Loads translations from a folder laid out as Multi30k.

    train.de and train.en are the training data, val.de and val.en are held out.

    Args:
        folder: the folder.
        languages: source and target language, the suffixes of the files.
        vocabulary: as in `read_pairs`.
        tokens: as in `read_pairs`.
        longest: as in `read_pairs`.

    Raises:
        OSError, ValueError: as in `read_pairs`.
    """
    folder = Path(folder)
    source, target = languages
    return read_pairs(
        train=(folder / f"train.{source}", folder / f"train.{target}"),
        validation=(folder / f"val.{source}", folder / f"val.{target}"),
        vocabulary=vocabulary,
        tokens=tokens,
        longest=longest,
    )


def read_pairs(
    *,
    train: tuple[Path | str, Path | str],
    validation: tuple[Path | str, Path | str],
    vocabulary: int = 8000,
    tokens: Tokens | None = None,
    longest: int = 256,
) -> Pairs:
    """Reads pairs from UTF-8 files with one text per line; line n of both files is a pair.

    White space around a line is stripped. Pairs with an empty or too long side are skipped.

    Args:
        train: source and target file of the training pairs.
        validation: source and target file of the held-out pairs.
        vocabulary: size of the tokenizer trained on both training files if `tokens` is None.
        tokens: tokenizer with special tokens.
        longest: maximum number of tokens of a side, including BEGIN and END of a target.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not UTF-8, two files differ in their number of lines, or no pair is
            left.
    """
    drawn = _read(train)
    held_out = _read(validation)
    if tokens is None:
        text = "\n".join(line for part in zip(*drawn, strict=True) for line in part)
        tokens = train_tokens(text, vocabulary, special=True)
    first, second = (Path(path) for path in train)
    return pair_texts(
        drawn,
        held_out,
        tokens=tokens,
        longest=longest,
        name=f"{first} and {second}",
        source=str(first.resolve().parent),
    )


def pair_texts(
    train: Sequence[TextPair],
    validation: Sequence[TextPair],
    *,
    tokens: Tokens,
    longest: int,
    name: str,
    source: str | None = None,
) -> Pairs:
    """Makes a dataset of pairs. Skips pairs and raises ValueError as `read_pairs`.

    Args:
        train: training pairs.
        validation: held-out pairs.
        tokens: tokenizer with special tokens.
        longest: maximum number of tokens of a side, including BEGIN and END of a target.
        name: display name.
        source: absolute path of the files, or None.
    """
    check_positive("longest", longest)
    tokens.check_special()
    digest = digest_of("pairs", tokens.to_json(), longest)
    parts: list[tuple[RaggedTokens, RaggedTokens]] = []
    skipped = 0
    for part, pairs in (("training", train), ("validation", validation)):
        digest = digest_of(digest, *(text for pair in pairs for text in pair))
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        non_empty = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
        firsts, seconds = (tokens.encode_all(pair[side] for pair in non_empty) for side in (0, 1))
        for first, second in zip(firsts, seconds, strict=True):
            if len(first) <= longest and len(second) + 2 <= longest:
                sources.append(first)
                targets.append(torch.cat([_BEGIN, second, _END]))
        if not sources:
            raise ValueError(
                f"{name}: none of the {len(pairs)} pairs in the {part} part has text on both "
                f"sides and at most {longest} tokens"
            )
        parts.append((RaggedTokens.of(sources), RaggedTokens.of(targets)))
        skipped += len(pairs) - len(sources)
    return Pairs(name, source, digest, tokens, parts[0], parts[1], skipped)


_BEGIN = torch.tensor([BEGIN])
_END = torch.tensor([END])


def _batch(part: tuple[RaggedTokens, RaggedTokens], pairs: Tensor) -> Batch:
    source, source_lengths = part[0].padded(pairs)
    target, target_lengths = part[1].padded(pairs)
    return {
        "source": source,
        "source_lengths": source_lengths,
        "target": target,
        "target_lengths": target_lengths,
    }


def _read(paths: tuple[Path | str, Path | str]) -> list[TextPair]:
    first, second = (_lines(Path(path)) for path in paths)
    if len(first) != len(second):
        raise ValueError(
            f"both files must have the same number of lines, got {len(first)} in {paths[0]} and "
            f"{len(second)} in {paths[1]}"
        )
    return list(zip(first, second, strict=True))


def _lines(path: Path) -> list[str]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.decode().strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not UTF-8: {error.reason}") from None
    return texts
