"""`make gpu-tune` without a GPU: its messages, and a rehearsal with emulated kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cases.gpu import TOKENS, WIDTH
from benchmarks.cases.tuning import KERNEL_VARIANTS, Group, KernelVariant
from benchmarks.report.tune import AGAIN, Compared, Failed, conclusion, line
from benchmarks.runner import tune
from benchmarks.runner.record import ROOT, Recorder
from building import edited
from building.edits import Edit
from building.emulated import Emulation
from building.tools import find_torch
from tests.bench.example import PROVENANCE
from tests.support import emulator
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.bench import Budget, Case, read_rows
from transformer_kernels.masks.mask import Mask

without_device = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the messages without a CUDA device"
)
LENGTH = 400
"""Several blocks of keys of every variant, the last of them partial."""
WRONG = KernelVariant(
    group=Group("sm80", "fwd", 128, 128),
    change="wrong",
    edits=(
        Edit(
            "cuda/sm80/forward.cuh",
            "add_product<Major::kMN>(o, s, v_tile);",
            "add_product<Major::kMN>(o, s, k_tile);",
        ),
    ),
)
"""Multiplies the weights by keys in place of values."""


@without_device
def test_without_a_device_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune"])
    assert tune.main() == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("make gpu-tune needs a CUDA device, and torch ")
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.exhaustive
@without_device
def test_the_program_fails_without_a_device() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runner.tune", "--only", KERNEL_VARIANTS[0].name],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu-tune needs a CUDA device")


def test_cases_have_the_tokens_and_the_width_of_the_suite() -> None:
    for group in tune.grouped(KERNEL_VARIANTS):
        cases = tune.cases_for(group, tune.LENGTHS)
        assert {case.B * case.M for case in cases} == {TOKENS}
        assert {case.H_q * case.D_v for case in cases} == {WIDTH}
        assert {(case.D, case.D_v) for case in cases} == {(group.D, group.D_v)}
        assert len({(case.name, case.M) for case in cases}) == 2 * len(tune.LENGTHS)


def test_a_group_compares_the_present_kernels_twice_and_its_own_variants() -> None:
    group = Group("sm80", "fwd", 128, 128)
    own = tune.grouped(KERNEL_VARIANTS)[group]
    by_label = tune.libraries(group, own)
    assert list(by_label) == ["present", AGAIN, *(variant.name for variant in own)]
    assert [library.edits for library in by_label.values()][:2] == [(), ()]
    assert len({library.namespace for library in by_label.values()}) == len(by_label)


@pytest.fixture
def emulated() -> Iterator[None]:
    """Restores the emulated operators and the setting of the Hopper kernels."""
    if (reason := emulator.unavailable_reason()) is not None:
        pytest.skip(reason)
    before = emulator.emulated_by()
    emulator.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOPPER_SWITCH, "1")
        yield
    emulator.emulate(before)


def small_cases(group: Group) -> Sequence[Case]:
    """Those of the program and one with dropout, whose mask some variants change, all of two heads,
    which are both compared with float64."""
    return [
        Case(
            name=name, H_q=2, H_kv=2, M=LENGTH, N=LENGTH, D=group.D, D_v=group.D_v,
            dtype=torch.bfloat16, mask=mask, mask_name=name, dropout_p=dropout_p,
        )
        for name, mask, dropout_p in (
            ("full", None, 0.0),
            ("causal", Mask.causal(), 0.0),
            ("dropout", None, 0.25),
        )
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_every_variant_is_right_in_the_emulator(emulated: None, tmp_path: Path) -> None:
    """The program from the compilation to its last lines, but for the GPU."""
    variants = [*KERNEL_VARIANTS, WRONG]
    for namespace, path in tune.build(variants, emulated_kernels()).items():
        torch.ops.load_library(path)
        getattr(torch.ops, namespace).set_chip(90)
    recorder = Recorder(PROVENANCE, Budget(0.0), folder=tmp_path, keep=False)
    budget = Budget(0.0, fewest=2, most=2)
    device = torch.device("cpu")
    results = list(tune.compare(variants, small_cases, budget, recorder, device))

    names = [f"{case.name}, S = {LENGTH}" for case in small_cases(WRONG.group)]
    failed = [one for one in results if isinstance(one, Failed)]
    assert [(one.variant, one.case) for one in failed] == [(WRONG.name, name) for name in names]
    expected = [
        (group, label, name)
        for group, own in tune.grouped(KERNEL_VARIANTS).items()
        for label in (AGAIN, *(variant.name for variant in own))
        for name in names
    ]
    compared = [one for one in results if isinstance(one, Compared)]
    assert {(one.group, one.variant, one.case) for one in compared} == set(expected)
    assert len(compared) == len(expected)
    rows = read_rows(tmp_path / "tune.csv")
    assert len(rows) == len(expected) + len(names) * len(tune.grouped(variants))
    assert all(row.error < 0.02 for row in rows)

    for variant in KERNEL_VARIANTS:
        assert_ran(variant.group, tune.libraries(variant.group, [variant])[variant.name])
    table = [line(one) for one in results]
    assert {text.count("|") for text in table} == {7}
    assert list(conclusion(variants, results))


def assert_ran(group: Group, library: edited.Library) -> None:
    """Asserts that the library itself launched the kernels of the group last."""
    folder = "sm90::" if group.kernels == "sm90" else ""
    kernel = "forward_kernel" if group.direction == "fwd" else "dq_postprocess_kernel"
    launched = getattr(torch.ops, library.namespace).latest_launch()
    assert launched.startswith(f"({folder}{kernel}")


def emulated_kernels() -> edited.Original:
    """The emulated kernels. Those compiled again run for seconds, so they are not optimised."""
    config = Emulation()
    emulator.build(config)
    units = config.units(find_torch(), ROOT)
    slow = [replace(unit, flags=(*unit.flags, "-O0")) for unit in units]
    folders = (emulator.folder(config), "build/tune_emulated")
    return edited.Original(slow, *folders, emulator.toolchain())
