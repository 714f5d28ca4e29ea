"""Facts that the package and csrc/ both state."""

from __future__ import annotations

from building.extension import ROOT
from transformer_kernels.masks.resolved import BLOCK_MASK_SIZE


def test_block_mask_entries_have_one_size() -> None:
    header = (ROOT / "csrc/common/mask.h").read_text()
    assert f"constexpr int64_t kBlockMaskSize = {BLOCK_MASK_SIZE};" in header
