"""Film reviews, positive or negative: the folder aclImdb of the Large Movie Review Dataset."""

from __future__ import annotations

from pathlib import Path

from transformer_kernels.nn.options import check_positive
from transformer_kernels.training.data.labelled import LabelledTexts, label_texts
from transformer_kernels.training.data.tokens import Tokens

CLASSES = {"negative": "neg", "positive": "pos"}
"""The folder of each class."""


def load_reviews(
    folder: Path | str, context: int = 512, *, tokens: Tokens | None = None
) -> LabelledTexts:
    """The reviews in `folder`, each cut to its first `context` tokens; those in train/ are drawn,
    those in test/ are held out.

    `tokens` is bytes unless given; to train them on the reviews that are drawn, see
    `review_text`. OSError where a folder is missing or unreadable, ValueError where one has no
    reviews or a review is empty.
    """
    check_positive("context", context)
    folder = Path(folder)
    train, validation = (
        [_texts(folder, part, name) for name in CLASSES.values()] for part in ("train", "test")
    )
    return label_texts(
        train,
        validation,
        classes=tuple(CLASSES),
        tokens=tokens or Tokens(),
        longest=context,
        name=str(folder),
        source=str(folder.resolve()),
    )


def review_text(folder: Path | str) -> bytes:
    """All reviews in train/, a line feed after each, for `train_tokens`; errors as above."""
    texts = [text for name in CLASSES.values() for text in _texts(Path(folder), "train", name)]
    return b"".join(text + b"\n" for text in texts)


def _texts(folder: Path, part: str, name: str) -> list[bytes]:
    place = folder / part / name
    if not place.is_dir():
        raise FileNotFoundError(f"there is no folder {place}: {_layout(folder)}")
    texts: list[bytes] = []
    for path in sorted(place.glob("*.txt")):
        texts.append(path.read_bytes())
        if not texts[-1].strip():
            raise ValueError(f"{path} is empty: every file must be a review")
    if not texts:
        raise ValueError(f"there are no *.txt in {place}: {_layout(folder)}")
    return texts


def _layout(folder: Path) -> str:
    return (
        f"{folder} must have reviews, one a file, in train/neg/*.txt, train/pos/*.txt, "
        "test/neg/*.txt and test/pos/*.txt"
    )
