"""Offline compilation of the kernels: every option compiles, fits and is compiled only once.

`make oldest` runs this file with the oldest supported Triton, for NVIDIA's chips.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton import linear_calls
from transformer_kernels.backends.triton.config import CHIPS

pytestmark = pytest.mark.exhaustive

SCRIPT = Path(__file__).parent / "compile_options.py"
ALWAYS = {"forward_kernel", "bwd_preprocess_kernel", "bwd_dkdv_kernel", "bwd_dq_kernel"}
LISTS = {"block_mask_kernel", "list_kernel"}
STRIPS = {"strip_sums_kernel"}
DISTANCES = {"distance_sums_kernel"}
KERNELS = {
    "plain": ALWAYS,
    "dense": ALWAYS | LISTS,
    "segments": ALWAYS | LISTS,
    "positions": ALWAYS | LISTS,
    "layout": ALWAYS | LISTS,
    "ranges": ALWAYS,
    "dropout": ALWAYS,
    "dropout-part": ALWAYS,
    "softcap": ALWAYS,
    "alibi": ALWAYS,
    "bias": ALWAYS | {"tile_sums_kernel"},
    "bias-float32": ALWAYS | {"tile_sums_kernel"},
    "bias-keys": ALWAYS | {"column_sums_kernel"},
    "relative": ALWAYS | STRIPS,
    "relative-shared": ALWAYS | LISTS | STRIPS,
    "keys": ALWAYS | DISTANCES,
    "keys-full": ALWAYS | DISTANCES,
    "keys-shared": ALWAYS | LISTS | DISTANCES,
    "everything": ALWAYS | LISTS | {"tile_sums_kernel"} | STRIPS,
    "everything-float32": ALWAYS | LISTS | {"tile_sums_kernel"} | STRIPS,
    "everything-keys": ALWAYS | LISTS | {"tile_sums_kernel"} | STRIPS | DISTANCES,
    "everything-keys-float32": ALWAYS | LISTS | {"tile_sums_kernel"} | STRIPS | DISTANCES,
    "everything-keys-128": ALWAYS | LISTS | {"tile_sums_kernel"} | STRIPS | DISTANCES,
    "segments-128": ALWAYS | LISTS,
    "segments-256": ALWAYS | LISTS,
    "positions-128": ALWAYS | LISTS,
    "varlen": ALWAYS,
    "varlen-relative": ALWAYS | STRIPS,
    "varlen-keys": ALWAYS | DISTANCES,
    **{case: kernels for case, (_, kernels) in linear_calls.CALLS.items()},
}
LINEAR_KERNELS = {"scan_kernel": 4, "sums_kernel": 2, "prefix_kernel": 2, "delta_kernel": 1}
"""Kernels of linear attention: scans for o, dq, dk and dv; sums and prefix sums of S and dS"""


@pytest.mark.parametrize("chip", ["sm86", "sm90", "gfx9"])
def test_every_option_compiles_and_fits_and_new_lengths_do_not_recompile(chip: str) -> None:
    """Runs in a subprocess in which Triton's interpreter is off."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), chip],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert {case: set(kernels) for case, kernels in found["shared_kib"].items()} == KERNELS
    for case, kernels in found["shared_kib"].items():
        for kernel, kib in kernels.items():
            assert kib <= CHIPS[chip].shared_kib, (case, kernel)
    assert found["keys"] == {
        "lengths": dict.fromkeys(ALWAYS, 1),
        "lengths-relative": dict.fromkeys(ALWAYS | STRIPS, 1),
        "lengths-keys": dict.fromkeys(ALWAYS | DISTANCES, 1),
        "lengths-linear": {
            "scan_kernel": 4,
            "sums_kernel": 2,
            "prefix_kernel": 2,
            "delta_kernel": 1,
        },
    }
    # A fused scale and subtraction would not round the score: docs/attention.md, section 8. The
    # forward kernel has fused operations in its logarithm, the others only those with log2(e).
    if chip.startswith("sm"):
        assert {found["fused"][kernel] for kernel in ("bwd_dkdv_kernel", "bwd_dq_kernel")} == {0}
