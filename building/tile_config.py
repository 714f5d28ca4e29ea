"""Constants of csrc/cuda/common/tile_config.h that determine the units, parsed from the header."""

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
"""Head widths of the kernels of sm80."""

RELATIVE_WIDTHS = tuple(_integers("kRelativeWidths"))
"""Those of the kernels with relative keys."""

LINEAR_WIDTHS = tuple(_integers("kLinearWidths"))
"""Those of the kernels of linear attention."""

_HOPPER = _integers("kHopperWidths")
HOPPER_WIDTHS = tuple(zip(_HOPPER[::2], _HOPPER[1::2], strict=True))
"""Head widths of the kernels of sm90: pairs of the width of q and k, and the width of v."""

LARGE_SHARED = frozenset(divmod(chip, 10) for chip in _integers("kLargeSharedChips"))
"""Compute capabilities with at least 163 KiB of shared memory per block."""
