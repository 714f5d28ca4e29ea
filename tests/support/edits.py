"""Edits of sources: mutants, the recipes of CONTRIBUTING.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which occurs `count` times in a source, by `new`."""

    source: str
    """relative to the folder of the edits"""
    old: str
    new: str
    count: int = 1

    def apply(self, text: str) -> str:
        """Returns the edited text. Raises ValueError if `old` occurs more or less often."""
        if (found := text.count(self.old)) != self.count:
            raise ValueError(f"{self.source} has {self.old!r} {found} times, not {self.count}")
        return text.replace(self.old, self.new)


def edited_texts(edits: Iterable[Edit], folder: Path) -> dict[str, str]:
    """Returns the edited texts by source. Raises ValueError if an edit does not apply."""
    texts: dict[str, str] = {}
    for edit in edits:
        before = texts.get(edit.source) or (folder / edit.source).read_text(encoding="utf-8")
        texts[edit.source] = edit.apply(before)
    return texts
