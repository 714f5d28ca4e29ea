"""Pairs of texts, one to be made from the other: translations, from two files a language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.dataset import Batch, digest_of, evenly
from transformer_kernels.training.data.ragged_tokens import RaggedTokens
from transformer_kernels.training.data.tokens import BEGIN, END, Tokens, train_tokens

TextPair = tuple[str, str]
"""A source, and the target to be made from it."""


@dataclass(frozen=True)
class Pairs:
    """A dataset of sources and of targets to be made from them, in the same tokens.

    {"source": (B, S), "source_lengths": (B,), "target": (B, T), "target_lengths": (B,)}.

    A target is the token BEGIN, its text and the token END, all counted in its length; a source is
    its text alone.
    """

    name: str
    source: str | None
    digest: str
    tokens: Tokens
    train: tuple[RaggedTokens, RaggedTokens]
    """Sources and targets, a row of each for a pair"""
    validation: tuple[RaggedTokens, RaggedTokens]
    left_out: int
    """How many pairs were empty on a side, or too long"""

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        pairs = torch.randint(len(self.train[0]), (count,), generator=generator)
        return _batch(self.train, pairs)

    def held_out(self, count: int) -> Batch:
        return _batch(self.validation, evenly(len(self.validation[0]), count))


def load_pairs(
    folder: Path | str,
    *,
    languages: tuple[str, str] = ("de", "en"),
    vocabulary: int = 8000,
    tokens: Tokens | None = None,
    longest: int = 256,
) -> Pairs:
    """The translations in `folder`, named as in Multi30k: train.de and train.en are drawn, val.de
    and val.en are held out; `languages` is that of the source, and that of the target.

    See `read_pairs` for the rest.
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
    """Pairs from files in UTF-8, one text a line: line n of the first file goes with line n of the
    second.

    Without `tokens`, byte pairs of both training files are merged to `vocabulary` tokens. White
    space around a line is dropped. Left out, and counted, are pairs with an empty side, and with
    more than `longest` tokens on a side, BEGIN and END included.

    OSError where a file cannot be read; ValueError where it is not UTF-8, where two files differ in
    their numbers of lines, or where no pair is left.
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
    """The dataset of these pairs; what is left out, and ValueError, as in `read_pairs`."""
    check_positive("longest", longest)
    tokens.check_special()
    digest = digest_of("pairs", tokens.to_json(), longest)
    parts: list[tuple[RaggedTokens, RaggedTokens]] = []
    left_out = 0
    for part, pairs in (("training", train), ("validation", validation)):
        digest = digest_of(digest, *(text for pair in pairs for text in pair))
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        there = [pair for pair in pairs if pair[0].strip() and pair[1].strip()]
        firsts, seconds = (tokens.encode_all(pair[side] for pair in there) for side in (0, 1))
        for first, second in zip(firsts, seconds, strict=True):
            if len(first) <= longest and len(second) + 2 <= longest:
                sources.append(first)
                targets.append(torch.cat([_BEGIN, second, _END]))
        if not sources:
            raise ValueError(
                f"{name}: of {len(pairs)} pairs in the {part} part, none has text on both sides "
                f"and at most {longest} tokens"
            )
        parts.append((RaggedTokens.of(sources), RaggedTokens.of(targets)))
        left_out += len(pairs) - len(sources)
    return Pairs(name, source, digest, tokens, parts[0], parts[1], left_out)


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
            f"two files of a pair must have as many lines, got {len(first)} in {paths[0]} and "
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
