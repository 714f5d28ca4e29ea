"""Constants of csrc/cuda/common/tile_config.h that decide what is built, parsed from the header."""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = Path(__file__).resolve().parents[1] / "csrc/cuda/common/tile_config.h"


def _integers(name: str) -> list[int]:
    """Every integer in the initializer of the constexpr array `name`."""
    found = re.search(rf"\b{name}\[\] = {{(.*?)}};", _HEADER.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{_HEADER} has no array {name}")
    return [int(number) for number in re.findall(r"\d+", found[1])]


WIDTHS = tuple(_integers("kWidths"))
"""Row widths of the tiles that every chip has"""

_pairs = iter(_integers("kHopperWidths"))
HOPPER_WIDTHS = tuple(zip(_pairs, _pairs, strict=True))
"""Row widths of Hopper's tiles: of q and k, and of v"""

LARGE_SHARED = frozenset(divmod(chip, 10) for chip in _integers("kLargeSharedChips"))
"""Compute capabilities with 163 KiB of shared memory a block or more"""
