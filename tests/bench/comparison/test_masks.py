from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.bench.comparison.masks import MaskOption
from transformer_kernels.bench.comparison.shapes import Shape
from transformer_kernels.masks.mask import Mask

SQUARE, STEP = Shape.parse("2,4,4,8,8,16"), Shape.parse("2,4,4,3,8,16")


def visible(text: str, shape: Shape = SQUARE, *, cut: bool = False) -> Tensor:
    mask = MaskOption.parse(text).mask(shape, cut=cut)
    assert mask is not None
    return mask.materialize(shape.B, 1, shape.M, shape.N)


def test_forms() -> None:
    lower = torch.ones(8, 8).tril().bool()
    band = lower.triu(-2)
    ids = torch.tensor([0] * 3 + [1] * 5)
    for text, expected in (
        ("causal", lower),
        ("window:3", band),
        ("document:3,5", ids[:, None] == ids),
        ("causal + document:3,5", (ids[:, None] == ids) & lower),
        ("full+causal", lower),
    ):
        assert torch.equal(visible(text), expected.expand(2, 1, 8, 8)), text
    keys = torch.arange(8)
    padded = torch.stack([keys < 5, keys < 8])[:, None, None].expand(2, 1, 8, 8)
    assert torch.equal(visible("padding:5,8"), padded)


def test_fewer_queries_are_the_last_ones() -> None:
    for text in ("causal", "window:3"):
        assert torch.equal(visible(text, STEP), visible(text)[:, :, 5:])


def test_masks_that_hide_nothing_are_none() -> None:
    """Peers have faster kernels without a mask, and with torch's flag `is_causal`."""
    assert MaskOption.parse("full").mask(SQUARE) is None
    assert MaskOption.parse("causal").mask(Shape.parse("1,4,4,1,8,16")) is None
    causal = MaskOption.parse("causal").mask(SQUARE)
    assert causal is not None
    assert causal.constraints == Mask.causal().constraints


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n", encoding="utf-8")
    assert torch.equal(visible(f"document:{file}"), visible("document:3,5"))
    file.write_text("3 -5", encoding="utf-8")
    with pytest.raises(ValueError, match="expected positive lengths, got '3 -5'"):
        MaskOption.parse(f"padding:{file}")
    with pytest.raises(OSError, match="nowhere"):
        MaskOption.parse("padding:nowhere.txt")


def test_lengths_are_cut_for_the_check() -> None:
    shorter = Shape.parse("1,4,4,4,4,16")
    assert torch.equal(visible("document:3,5", shorter, cut=True), visible("document:3,1", shorter))
    assert torch.equal(visible("padding:3,8", shorter, cut=True), visible("padding:3", shorter))


@each(
    ("text", "message"),
    [
        ("document:3,4", "documents need M = N tokens, .* M = 8, N = 8 and a sum of 7"),
        ("document:3,6", "documents need M = N tokens, .* M = 8, N = 8 and a sum of 9"),
        ("padding:3", "needs 2 lengths of at most 8, .* got 1 of at most 3"),
        ("padding:3,4,5", "needs 2 lengths of at most 8, .* got 3 of at most 5"),
        ("padding:3,9", "needs 2 lengths of at most 8, .* got 2 of at most 9"),
    ],
)
def test_lengths_must_fit_the_shape(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskOption.parse(text).mask(SQUARE)


@each("text", ["", "casual", "causal:3", "window", "window:0", "window:-3", "padding:", "full+"])
def test_other_texts_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="expected full, causal, window:W"):
        MaskOption.parse(text)
