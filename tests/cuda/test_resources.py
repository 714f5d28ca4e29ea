"""What nvcc made of the kernels: every chip has them, and registers suffice where it matters."""

from __future__ import annotations

import sysconfig

import pytest

from building.cuda import ELEMENTS, WIDTHS
from building.extension import ROOT
from tests.cuda.ptxas import Resources, parse, reports
from transformer_kernels import _C

FOLDER = ROOT / f"build/extension{sysconfig.get_config_var('EXT_SUFFIX').removesuffix('.so')}"
CHIPS = [name for name in _C.build_info()["cuda_architectures"] if name.startswith("sm_")]
MOST_SPILLED = {64: 0, 128: 272}
"""bytes, for widths of heads that models have; at 128 registers do not suffice (docs/cuda.md)"""

EXAMPLE = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN2tk4cuda14forward_kernelINS0_4HalfELi64EEEvx' for 'sm_90'
ptxas info    : Function properties for _ZN2tk4cuda14forward_kernelINS0_4HalfELi64EEEvx
    256 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 252 registers, used 1 barriers, 256 bytes cumulative stack size
ptxas info    : Compiling entry function '_ZN2tk4cudaL12clear_kernelEPjl' for 'sm_80'
ptxas info    : Function properties for _ZN2tk4cudaL12clear_kernelEPjl
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers
"""  # noqa: E501


def test_reports_are_understood() -> None:
    forward, clear = parse(EXAMPLE, "half", 64)
    assert str(forward) == (
        "forward_kernel, half 64, sm_90: 252 registers, 256 bytes of stack, 12 bytes spilled"
    )
    assert (clear.kernel, clear.architecture, clear.registers) == ("clear_kernel", "sm_80", 26)


@pytest.fixture(scope="module")
def built() -> list[Resources]:
    if not CHIPS:
        pytest.skip("needs nvcc: the extension is built without CUDA kernels")
    if not FOLDER.is_dir():
        pytest.skip(f"needs the build's own files, and there is no {FOLDER}")
    return reports(FOLDER)


def test_every_chip_has_every_kernel(built: list[Resources]) -> None:
    units = {(one.element, one.width) for one in built} - {("", 0)}
    assert units == {(element.lower(), width) for element in ELEMENTS for width in WIDTHS}
    kernels = {(one.kernel, one.element, one.width) for one in built}
    for kernel in kernels:
        have = {o.architecture for o in built if (o.kernel, o.element, o.width) == kernel}
        assert have >= set(CHIPS), kernel


def test_registers_suffice_for_common_widths(built: list[Resources]) -> None:
    halves = [one for one in built if one.element in ("half", "bfloat16")]
    common = [one for one in halves if one.width in MOST_SPILLED and one.architecture in CHIPS]
    assert {one.kernel for one in common} >= {"forward_kernel", "backward_kernel"}
    assert [str(one) for one in common if one.spilled > MOST_SPILLED[one.width]] == []
