"""Offline compilation of the kernels: every option and every tile compiles and fits its chip.

`make oldest` compiles every option with the oldest supported Triton, for NVIDIA's chips.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.kernels.triton.compile_options import CALLS, LENGTHS
from transformer_kernels import cli
from transformer_kernels.backends.triton import config
from transformer_kernels.backends.triton.compile_report import ATTENTION, Compiled, compile_tiles
from transformer_kernels.linear.delta.triton import tiles as delta_tiles
from transformer_kernels.linear.delta.triton.kernels.arguments import SUB_BLOCK
from transformer_kernels.linear.triton import tiles

pytestmark = pytest.mark.exhaustive


def run_script(script: Path, chip: str) -> str:
    """Runs a script in a process in which Triton's interpreter is off. Returns its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(script), chip],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.parametrize("chip", ["sm86", "sm90", "gfx9"])
def test_every_option_compiles_and_fits_and_new_lengths_do_not_recompile(chip: str) -> None:
    found = json.loads(run_script(Path(__file__).parent / "compile_options.py", chip))
    expected = {case: kernels for case, (_, kernels) in CALLS.items()}
    assert {case: set(kernels) for case, kernels in found["shared_kib"].items()} == expected
    for case, kernels in found["shared_kib"].items():
        for kernel, kib in kernels.items():
            assert kib <= config.CHIPS[chip].shared_kib, (case, kernel)
    assert found["keys"] == {case: counts for case, (_, counts) in LENGTHS.items()}
    # Only exponents of plain scores are fused: docs/attention.md, section 8. The forward kernel has
    # fused operations in its logarithm, too.
    if chip.startswith("sm"):
        for kernel in ("bwd_dkdv_kernel", "bwd_dq_kernel"):
            assert found["fused"]["alibi"][kernel] == 0
            assert found["fused"]["plain"][kernel] > 0


CHIPS = ("sm80", "sm90", "sm100", "gfx9")
SUMS = {"tile_sums", "strip_sums", "distance_sums"}
WITH_KEYS = {"keys_forward", "keys_dkdv", "keys_dq"}
DECODE = {"combine", "decode, pages", "decode, pages, int8"}
KERNELS = {"decode", *DECODE, "forward", "bwd_preprocess", "bwd_dkdv", "bwd_dq", *WITH_KEYS, *SUMS}
LINEAR = {
    f"linear {name}{decay}"
    for name in ("o", "dq", "dk", "dv", "delta", "sums of S", "sums of dS", "steps")
    for decay in ("", ", decay")
} | {"linear prefix", "linear decay_gradient, decay"}
DELTA = {
    "sums", "pairs", "scan", "states", "reverse", "state_gradients", "pair_gradients",
    "decay_gradient", "steps",
}  # fmt: skip
MOST_SPILLS_OF_DELTA = 27
UNPREDICTED = {"bwd_preprocess", *SUMS, *DECODE, *LINEAR}
SCRIPT = """
import dataclasses, json, sys
from transformer_kernels.backends.triton.compile_report import ATTENTION, compile_tiles
from transformer_kernels.linear.delta.triton.report import DELTA
from transformer_kernels.linear.triton.report import LINEAR
if __name__ == "__main__":
    for suite in (ATTENTION, LINEAR, DELTA):
        for compiled in compile_tiles(suite, (sys.argv[1],)):
            print(json.dumps(dataclasses.asdict(compiled)))
"""


@pytest.mark.parametrize("name", CHIPS)
def test_all_tiles_compile_and_fit_and_common_ones_do_not_spill(name: str, tmp_path: Path) -> None:
    """One test per chip, because its kernels take half a minute to compile."""
    script = tmp_path / "compile.py"
    script.write_text(SCRIPT)
    lines = run_script(script, name).splitlines()
    compiled = [Compiled(**json.loads(line)) for line in lines]
    assert_all_fit(compiled)
    assert_shared_memory_is_as_predicted(compiled)
    assert_loops_of_common_tiles_do_not_spill(compiled)


def delta_kernels(chip: config.Chip, dtype: str, columns: int) -> set[str]:
    found = set()
    precision = delta_tiles.precision(chip, getattr(torch, dtype))
    for channels in (False, True):
        tile = delta_tiles.tile(chip, columns, precision, channels=channels)
        names = DELTA | ({"merge"} if tile.chunk > SUB_BLOCK else set())
        names |= {"own_pairs"} if channels else set()
        found |= {f"delta {name}{', channels' if channels else ''}" for name in names}
    return found


def assert_all_fit(compiled: list[Compiled]) -> None:
    chip = config.CHIPS[compiled[0].chip]
    made = {(one.kernel, one.dtype, one.columns) for one in compiled}
    assert made == {
        (kernel, dtype, columns)
        for kernel in KERNELS
        for dtype in ("bfloat16", "float32")
        for columns in config.WIDTHS
        if kernel not in {*WITH_KEYS, "distance_sums"}
        or config.tile("keys_dkdv", chip, 2 if dtype == "bfloat16" else 4, columns) is not None
    } | {
        (kernel, dtype, columns)
        for kernel in LINEAR
        for dtype in ("bfloat16", "float32")
        for columns in tiles.WIDTHS
        if dtype == "bfloat16" or not kernel.endswith(", decay")
    } | {
        (kernel, dtype, columns)
        for dtype in ("bfloat16", "float32")
        for columns in tiles.WIDTHS
        for kernel in delta_kernels(chip, dtype, columns)
    }
    for one in compiled:
        print(one)
        assert one.shared_kib <= chip.shared_kib, one


def assert_shared_memory_is_as_predicted(compiled: list[Compiled]) -> None:
    """Checks `config.shared_bytes`, which tuning relies on, for half precision up to width 128.

    For wider rows the compiler may keep a transposed copy, and for float32 the bfloat16 parts.
    """
    for one in compiled:
        is_delta = one.kernel.startswith("delta ")
        if is_delta or one.kernel in UNPREDICTED or one.dtype == "float32" or one.columns > 128:
            continue
        kernel = cast(config.Kernel, one.kernel)
        chip = config.CHIPS[one.chip]
        tile = config.tile(kernel, chip, 2, one.columns)
        assert tile is not None
        predicted = config.shared_bytes(kernel, chip, tile, 2, one.columns) / 1024
        assert 0.3 * predicted < one.shared_kib <= predicted + 2, one


def assert_loops_of_common_tiles_do_not_spill(compiled: list[Compiled]) -> None:
    """Those of linear attention with the gradient of a decay do (docs/linear.md, section 7), and
    those of the delta rule a little (docs/delta.md, section 6)."""
    common = [
        one
        for one in compiled
        if one.dtype == "bfloat16" and one.columns <= 128 and not one.kernel.endswith(", decay")
    ]
    delta = [one for one in common if one.kernel.startswith("delta ")]
    others = KERNELS | {n for n in LINEAR if not n.endswith(", decay")}
    assert len(common) - len(delta) == 2 * len(others)
    assert [one for one in common if one.spills_in_loops and one not in delta] == []
    assert [one for one in delta if one.spills_in_loops > MOST_SPILLS_OF_DELTA] == []


def test_compilation_is_refused_with_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the tests run with the interpreter on."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off: there is a GPU here")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        next(compile_tiles(ATTENTION))
    assert cli.main(["tiles"]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
