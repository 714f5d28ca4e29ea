"""Tests of film reviews in a folder laid out as aclImdb."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from transformer_kernels.training.data import Tokens, load_reviews, review_text, train_tokens

CLASS_FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for class_folder in CLASS_FOLDERS:
        (tmp_path / class_folder).mkdir(parents=True)
        for number in range(5):
            text = f"{class_folder} {number}: caf\u00e9<br />" + "!" * number
            (tmp_path / class_folder / f"{number}_7.txt").write_text(text, encoding="utf-8")
    (tmp_path / "train/unsup").mkdir()
    (tmp_path / "train/pos/notes.md").write_text("no review")
    return tmp_path


def test_train_folder_is_drawn_and_test_folder_is_held_out(folder: Path) -> None:
    reviews = load_reviews(folder, 64)
    assert reviews.classes == ("negative", "positive")
    drawn = reviews.draw(60, torch.Generator())
    for batch, part in ((drawn, "train"), (reviews.held_out(10), "test")):
        seen = set()
        columns = (batch[name] for name in ("tokens", "lengths", "labels"))
        for row, length, label in zip(*columns, strict=True):
            text = reviews.tokens.decode(row[:length]).decode()
            assert text.startswith(f"{part}/{('neg', 'pos')[label]} ")
            assert "caf\u00e9<br />" in text
            seen.add(text)
        assert len(seen) == 10
    assert len(reviews.held_out(99)["labels"]) == 10


def test_reviews_with_a_byte_pair_tokenizer(folder: Path) -> None:
    text = review_text(folder)
    assert text.count(b"\n") == 10
    assert b"test/" not in text
    tokens = train_tokens(text, 280)
    batch = load_reviews(folder, 8, tokens=tokens).held_out(4)
    assert batch["tokens"].shape == (4, 8)
    assert tokens.decode(batch["tokens"][0]).startswith(b"test/neg 0")


def test_invalid_utf8_is_accepted(folder: Path) -> None:
    (folder / "train/neg/9_1.txt").write_bytes(b"\xff\xfe\x00")
    assert load_reviews(folder).train[0][5].tolist() == [255, 254, 0]


@pytest.mark.parametrize("class_folder", CLASS_FOLDERS)
def test_missing_folder_error_describes_the_layout(folder: Path, class_folder: str) -> None:
    shutil.rmtree(folder / class_folder)
    refused = re.escape(
        f"the folder {folder / class_folder} does not exist: {folder} must contain reviews, "
        "one per file, in train/neg/*.txt, train/pos/*.txt, test/neg/*.txt and test/pos/*.txt"
    )
    with pytest.raises(FileNotFoundError, match=refused):
        load_reviews(folder)


def test_empty_folder_error_describes_the_layout(folder: Path) -> None:
    shutil.rmtree(folder / "test/pos")
    (folder / "test/pos").mkdir()
    refused = r"the folder .*test/pos has no \*\.txt files: .* must contain reviews"
    with pytest.raises(ValueError, match=refused):
        load_reviews(folder)


def test_empty_review_is_named(folder: Path) -> None:
    (folder / "test/pos/3_7.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"3_7\.txt is empty: every file must be a review"):
        load_reviews(folder)


def test_context_of_zero_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="context must be a whole number of at least 1, got 0"):
        load_reviews(folder, 0, tokens=Tokens())
