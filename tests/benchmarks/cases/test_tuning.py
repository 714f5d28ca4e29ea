from __future__ import annotations

import re
from pathlib import Path

from benchmarks.cases.tuning import KERNEL_VARIANTS, TILES, KernelVariant
from building.chips import Chips
from building.cuda import cuda_units
from building.edits import edited_texts
from building.extension import ROOT
from building.tools import Torch
from tests.support.tiers import each

CHIPS = Chips(((9, 0),), ptx=False, hopper=True)
KERNELS = {
    unit.variant: unit.source
    for unit in cuda_units(Torch("2.13.0", Path("torch")), CHIPS)
    if unit.source.endswith("kernels.cu")
}


def test_names_are_unique_and_name_files_and_namespaces() -> None:
    names = [variant.name for variant in KERNEL_VARIANTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


@each("variant", KERNEL_VARIANTS, ids=str)
def test_every_edit_applies_once_to_the_present_sources(variant: KernelVariant) -> None:
    for source, text in edited_texts(variant.edits, ROOT / "csrc").items():
        assert text != (ROOT / "csrc" / source).read_text()


@each("variant", KERNEL_VARIANTS, ids=str)
def test_a_variant_changes_a_tile_of_a_unit_that_exists(variant: KernelVariant) -> None:
    assert KERNELS[variant.unit] == f"csrc/cuda/{variant.group.kernels}/kernels.cu"
    assert variant.edits[0].source == TILES
    assert all(edit.source.endswith((".h", ".cuh")) for edit in variant.edits)
