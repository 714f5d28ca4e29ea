"""Fixtures of the tests that train from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"row, row, row your boat number {n}\n" for n in range(300)))
    return path
