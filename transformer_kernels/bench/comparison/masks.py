"""Masks of attention calls, as given on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...masks.mask import Mask
from .shapes import Shape

Build = Callable[[Shape, bool], Mask | None]
"""(shape, cut) -> mask; None hides nothing. `cut`: the lengths may be for a larger shape."""

FORMS = "full, causal, window:W, padding:LENGTHS or document:LENGTHS, or several joined by +"


@dataclass(frozen=True)
class MaskOption:
    """A mask for any shape that its lengths fit."""

    text: str
    _parts: tuple[Build, ...]

    @staticmethod
    def parse(text: str) -> MaskOption:
        """Parses FORMS. LENGTHS are numbers separated by commas, or a file of numbers.

        Raises:
            ValueError: the text or a file has another form.
            OSError: a file cannot be read.
        """
        return MaskOption(text, tuple(map(_parse, text.split("+"))))

    def mask(self, shape: Shape, *, cut: bool = False) -> Mask | None:
        """Returns the mask of a call; None if every pair is visible.

        Args:
            shape: sizes of the call.
            cut: accept lengths for a larger shape, and use the first sequences and tokens.

        Raises:
            ValueError: the lengths do not fit the shape.
        """
        masks = [mask for part in self._parts if (mask := part(shape, cut)) is not None]
        if not masks:
            return None
        return Mask(tuple(one for mask in masks for one in mask.constraints))


def _full(_shape: Shape, _cut: bool) -> None:
    return None


FULL = MaskOption("full", (_full,))


def _parse(text: str) -> Build:
    name, separator, argument = text.strip().partition(":")
    if name in ("full", "causal") and not separator:
        return _causal if name == "causal" else _full
    if name == "window" and argument.isascii() and argument.isdecimal() and int(argument) > 0:
        return _window(int(argument))
    if name in ("padding", "document") and argument:
        lengths = _lengths(argument)
        return _padding(lengths) if name == "padding" else _documents(lengths)
    raise ValueError(f"expected {FORMS}, got {text!r}")


def _causal(shape: Shape, _cut: bool) -> Mask | None:
    """The last query sees every key. A single query sees all, and needs no mask."""
    if shape.M == 1:
        return None
    return Mask.causal() if shape.M == shape.N else Mask.causal(align="bottom_right")


def _window(width: int) -> Build:
    return lambda shape, _cut: Mask.window(
        width - 1, 0, align="top_left" if shape.M == shape.N else "bottom_right"
    )


def _padding(lengths: Sequence[int]) -> Build:
    def build(shape: Shape, cut: bool) -> Mask:
        if len(lengths) < shape.B or (
            not cut and (len(lengths) > shape.B or max(lengths) > shape.N)
        ):
            raise ValueError(
                f"padding needs {shape.B} lengths of at most {shape.N}, one for each sequence, got "
                f"{len(lengths)} of at most {max(lengths)}"
            )
        return Mask.padding(torch.tensor(lengths[: shape.B]).clamp(max=shape.N))

    return build


def _documents(lengths: Sequence[int]) -> Build:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def build(shape: Shape, cut: bool) -> Mask:
        if shape.M != shape.N or len(ids) < shape.N or (not cut and len(ids) > shape.N):
            raise ValueError(
                "documents need M = N tokens, and lengths with this sum; got "
                f"M = {shape.M}, N = {shape.N} and a sum of {len(ids)}"
            )
        return Mask.segments(ids[: shape.N].expand(shape.B, -1).contiguous())

    return build


def _lengths(argument: str) -> list[int]:
    text = argument
    if not argument.replace(",", "").isdecimal():
        text = Path(argument).read_text(encoding="utf-8")
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{argument}: expected positive lengths, got {text[:40]!r}")
    return [int(word) for word in words]
