"""Shares of the tests: `pytest --share 2/8` runs an eighth of them, in about an eighth of the time.

Long tests are dealt out first, each to the share with the least recorded seconds. All others are
dealt out by a checksum of their names, and stay in their share whatever else is added. The
tests of a file that compiles kernels of its own stay together, so that one share only waits for the
compiler. Those that need a build with CUDA kernels are in the last share.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.support.budget import function_of

COMPILING = ("tests/kernels/cuda/", "tests/fuzz/", "tests/support/")
"""Folders of tests that compile variants of the kernels, each file its own."""
WITH_CUDA = ("tests/kernels/cuda/test_compiled.py",)
"""Tests of an extension that has CUDA kernels. CI builds them for the last share."""
BUILD = 400.0
"""Core-seconds of that build."""
LONG = 2.0
"""Recorded seconds from which a unit is dealt out by its duration."""


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

    def of(self, names: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
        """Returns the names in the share.

        Args:
            names: names (node ids) of all tests that the shares divide.
            seconds: recorded seconds of an item, by function.
        """
        units = defaultdict[str, float](float)
        unit_of = {name: _unit(name) for name in names}
        for name, unit in unit_of.items():
            units[unit] += seconds.get(function_of(name), 0.0)
        share_of = {unit: zlib.crc32(unit.encode()) % self.count for unit in units}
        share_of |= dict.fromkeys(WITH_CUDA, self.count - 1)
        load = [0.0] * (self.count - 1) + [BUILD]
        for unit, total in units.items():
            if total < LONG or unit in WITH_CUDA:
                load[share_of[unit]] += total
        for unit in sorted(units, key=lambda unit: (-units[unit], unit)):
            if units[unit] >= LONG and unit not in WITH_CUDA:
                share_of[unit] = load.index(min(load))
                load[share_of[unit]] += units[unit]
        return {name for name, unit in unit_of.items() if share_of[unit] == self.number - 1}


def _unit(name: str) -> str:
    """Returns what stays together: the file of a test that compiles, else the item."""
    return name.partition("::")[0] if name.startswith(COMPILING) else name
