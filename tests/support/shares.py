"""Shares of the tests: `pytest --share 2/8` runs an eighth of them.

Tests are dealt out by a checksum of their names, so that the parameters of a test, which often take
equally long, are in all shares, and a test is in the same share on every machine. The tests of a
file that compiles kernels of its own stay together, so that one share only waits for the compiler.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import pytest

COMPILING = ("tests/csrc/cuda/", "tests/fuzz/", "tests/support/")
"""Folders of tests that compile variants of the kernels, each file its own."""


@dataclass(frozen=True)
class Share:
    """Share `number` (from 1) of `count`."""

    number: int
    count: int

    @staticmethod
    def parse(text: str) -> Share:
        """Parses "2/8".

        Raises:
            ValueError: the text has another form.
        """
        words = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if words is None or not 1 <= int(words[1]) <= int(words[2]):
            raise ValueError(f"--share must be K/N with 1 <= K <= N, such as 2/8, got {text!r}")
        return Share(int(words[1]), int(words[2]))

    def has(self, name: str) -> bool:
        """Returns whether the test with this name (node id) is in the share."""
        key = name.partition("::")[0] if name.startswith(COMPILING) else name
        return zlib.crc32(key.encode()) % self.count == self.number - 1


def keep_share(text: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the collected tests of other shares.

    Raises:
        pytest.UsageError: the text is not the name of a share.
    """
    try:
        share = Share.parse(text)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    others = [item for item in items if not share.has(item.nodeid)]
    items[:] = [item for item in items if share.has(item.nodeid)]
    config.hook.pytest_deselected(items=others)
