"""Film reviews with sentiment labels: the folder aclImdb of the Large Movie Review Dataset."""

from __future__ import annotations

from pathlib import Path

from ...nn.options import check_positive
from .labelled import LabelledTexts, label_texts
from .tokens import Tokens

CLASSES = {"negative": "neg", "positive": "pos"}
"""Folder of each class"""


def load_reviews(
    folder: Path | str, context: int = 512, *, tokens: Tokens | None = None
) -> LabelledTexts:
    """Loads film reviews; train/ is the training data, test/ is held out.

    Args:
        folder: folder laid out as aclImdb.
        context: maximum number of tokens; longer reviews are cut.
        tokens: tokenizer; None makes each byte a token. See `review_text` to train one.

    Raises:
        OSError: a folder is missing or unreadable.
        ValueError: a folder has no reviews, or a review is empty.
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
    """All reviews in train/, each followed by a line feed, to train a tokenizer on.

    Raises:
        OSError, ValueError: as in `load_reviews`.
    """
    texts = [text for name in CLASSES.values() for text in _texts(Path(folder), "train", name)]
    return b"".join(text + b"\n" for text in texts)


def _texts(folder: Path, part: str, name: str) -> list[bytes]:
    class_folder = folder / part / name
    if not class_folder.is_dir():
        raise FileNotFoundError(f"the folder {class_folder} does not exist: {_layout(folder)}")
    texts: list[bytes] = []
    for path in sorted(class_folder.glob("*.txt")):
        texts.append(path.read_bytes())
        if not texts[-1].strip():
            raise ValueError(f"{path} is empty: every file must be a review")
    if not texts:
        raise ValueError(f"the folder {class_folder} has no *.txt files: {_layout(folder)}")
    return texts


def _layout(folder: Path) -> str:
    return (
        f"{folder} must contain reviews, one per file, in train/neg/*.txt, train/pos/*.txt, "
        "test/neg/*.txt and test/pos/*.txt"
    )
