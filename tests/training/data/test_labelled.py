"""Tests of labelled texts."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.training.data import LabelledTexts, Tokens, label_texts


@pytest.fixture
def letters() -> LabelledTexts:
    """Training texts are lower case, held-out texts upper case; class a is by far the largest."""
    return label_texts(
        [[b"a" * (i % 7 + 1) for i in range(300)], [b"b"], [b"cc", b"c"]],
        [[b"A" * (i + 1) for i in range(9)], [b"B"] * 3, [b"C"] * 9],
        classes=("a", "b", "c"),
        tokens=Tokens(),
        longest=5,
        name="letters",
    )


def test_texts_match_their_labels(letters: LabelledTexts) -> None:
    for batch, names in (
        (letters.draw(200, torch.Generator()), "abc"),
        (letters.held_out(21), "ABC"),
    ):
        for row, length, label in zip(
            batch["tokens"], batch["lengths"].tolist(), batch["labels"].tolist(), strict=True
        ):
            assert letters.tokens.decode(row[:length]) == names[label].encode() * length


def test_classes_are_drawn_with_equal_probability(letters: LabelledTexts) -> None:
    labels = letters.draw(3000, torch.Generator().manual_seed(0))["labels"]
    deviation = (3000 * 1 / 3 * 2 / 3) ** 0.5
    assert (labels.bincount() - 1000).abs().max() < 4 * deviation


def test_every_text_is_drawn(letters: LabelledTexts) -> None:
    batch = letters.draw(2000, torch.Generator())
    assert set(batch["lengths"][batch["labels"] == 0].tolist()) == {1, 2, 3, 4, 5}
    assert set(batch["lengths"][batch["labels"] == 2].tolist()) == {1, 2}


def test_long_texts_are_cut(letters: LabelledTexts) -> None:
    assert letters.draw(100, torch.Generator())["lengths"].max() == 5
    assert letters.held_out(30)["lengths"].max() == 5


@pytest.mark.parametrize(
    ("count", "labels"),
    [
        (7, [0, 1, 2, 0, 1, 2, 0]),
        (2, [0, 1]),
        (15, [0, 1, 2] * 3 + [0, 2] * 2),
        (99, [0, 1, 2] * 3 + [0, 2] * 6),
    ],
)
def test_held_out_examples_cycle_through_the_classes(
    letters: LabelledTexts, count: int, labels: list[int]
) -> None:
    assert letters.held_out(count)["labels"].tolist() == labels


def test_held_out_texts_are_evenly_spaced_in_a_class(letters: LabelledTexts) -> None:
    batch = letters.held_out(9)
    assert batch["lengths"][batch["labels"] == 0].tolist() == [1, 5, 5]
