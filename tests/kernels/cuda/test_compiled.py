"""Compiled CUDA kernels: architectures, register spills and instruction counts within bounds."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from building.chips import HOPPER_CODE, code, default_chips
from building.cuda import ELEMENTS, HOPPER_ELEMENTS, PRODUCTS, CudaBuild, kernel_units, linear_units
from building.cuda_toolkit import NoCudaError, find_toolkit
from building.extension import OBJECTS, ROOT
from building.tile_config import HOPPER_WIDTHS, LINEAR_WIDTHS
from tests.kernels.cuda import sass
from tests.support.tiers import each
from transformer_kernels import _C
from transformer_kernels.backends.triton.compile_report import cuobjdump

FOLDER = ROOT / OBJECTS
ARCHITECTURES = _C.build_info()["cuda_architectures"]
CHIPS = [name for name in ARCHITECTURES if name.startswith("sm_") and name != HOPPER_CODE]
KERNELS = {"forward_kernel", "backward_kernel", "relative_gradient_kernel", "decode_kernel"}
"""Some of the kernels of every element type and width."""
RELATIVE_KERNELS = {
    *("forward_kernel", "bias_gradient_kernel", "relative_gradient_kernel"),
    *("relative_dkdv_kernel", "relative_dq_kernel", "relative_keys_gradient_kernel"),
}
"""Those with relative keys. Their tiles are smaller, and up to width 128 nothing is spilled."""

LINEAR_KERNELS = {"results_kernel", "sums_kernel", "steps_kernel", "delta_kernel"}
"""Kernels of linear attention of every element type and width."""

KERNELS_OF = {"": KERNELS, "relative-": RELATIVE_KERNELS, "linear-": LINEAR_KERNELS}

MAX_LINEAR_SPILLS = 300
"""Bytes. Operands of two parts spill (docs/linear.md); names of kernels do not tell them apart."""

MAX_SPILLS = {64: 0, 128: 240}
"""Bytes, by common head width: of loop invariants, mostly addresses (docs/cuda.md, section 7)."""

MAX_SPILLS_64 = {
    "forward_kernel": 230,
    "backward_kernel": 40,
    "bias_gradient_kernel": 176,
    "relative_gradient_kernel": 176,
}
"""Bytes at width 64. The forward pass holds scores of 32 x 128 and o of 32 x 64 per warp, 192
registers; gradients of biases hold a tile of sums besides s and dp."""

WIDTHS = {prefix: widths for prefix, (_, widths) in PRODUCTS.items()} | {"linear-": LINEAR_WIDTHS}
"""Prefixes of the names of units, with their widths."""

MAX_HOPPER_SPILLS = {
    "backward_kernel": {64: 36, 128: 36, 192: 36},
    "dropout_backward_kernel": {64: 610, 128: 210, 192: 290},
    "forward_kernel": {64: 64},
}
"""Bytes, by width. Without dropout: a few values, in the forward pass addresses that only rare
branches load. With dropout also bits and keys of the mask."""

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
ptxas info    : Compiling entry function '_ZN2tk4cuda4sm9014forward_kernelINS0_4HalfELi192ELi128EEEvx' for 'sm_90a'
ptxas info    : Function properties for _ZN2tk4cuda4sm9014forward_kernelINS0_4HalfELi192ELi128EEEvx
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 7 barriers
"""  # noqa: E501

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_UNIT = re.compile(r"kernels-(relative-|linear-)?(\w+?)-(\d+)(?:-(\d+))?\.o\.ptxas")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one kernel on one architecture.

    `element` is "" and the widths are 0 for kernels that do not depend on them.
    """

    kernel: str
    architecture: str
    element: str
    width: int
    v_width: int
    registers: int
    stack: int
    spilled: int
    """Bytes of spill stores and spill loads."""
    products: str = ""
    """"relative-" for the kernels with relative keys, "linear-" for those of linear attention."""

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.products}{self.element} {self._widths}, "
            f"{self.architecture}: {self.registers} "
            f"registers, {self.stack} bytes of stack, {self.spilled} bytes spilled"
        )

    @property
    def _widths(self) -> str:
        return f"{self.width}/{self.v_width}" if self.v_width else f"{self.width}"


def parse(
    report: str, element: str = "", width: int = 0, v_width: int = 0, products: str = ""
) -> Iterator[Resources]:
    """Resources of each kernel in the output of ptxas."""
    for entry in _ENTRY.finditer(report):
        kernel = sass.KERNEL.search(entry["symbol"])
        yield Resources(
            kernel=entry["symbol"] if kernel is None else kernel[1],
            architecture=entry["architecture"],
            element=element,
            width=width,
            v_width=v_width,
            products=products,
            registers=int(entry["registers"]),
            stack=int(entry["stack"]),
            spilled=int(entry["stores"]) + int(entry["loads"]),
        )


def reports(folder: Path) -> list[Resources]:
    """Resources of all kernels that nvcc compiled in this build folder."""
    found: list[Resources] = []
    for path in sorted(folder.rglob("*.ptxas")):
        unit = _UNIT.fullmatch(path.name)
        variant = (unit[2], int(unit[3]), int(unit[4] or 0), unit[1] or "") if unit else ()
        found += parse(path.read_text(), *variant)
    return found


def diagnostics(folder: Path) -> list[str]:
    """Warnings and advisories of ptxas, such as C7510: wgmma products are serialized."""
    lines = [
        f"{path.name}: {line}"
        for path in sorted(folder.rglob("*.ptxas"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if re.search(r"warning|\bC\d{4}\b", line, re.IGNORECASE)]


def test_reports_are_parsed() -> None:
    forward, clear, hopper = parse(EXAMPLE, "half", 64)
    assert str(forward) == (
        "forward_kernel, half 64, sm_90: 252 registers, 256 bytes of stack, 12 bytes spilled"
    )
    assert (clear.kernel, clear.architecture, clear.registers) == ("clear_kernel", "sm_80", 26)
    assert (hopper.kernel, hopper.architecture) == ("forward_kernel", "sm_90a")


def test_report_names_give_element_and_widths(tmp_path: Path) -> None:
    for name in (
        *("kernels-float-96", "kernels-bfloat16-192-128", "kernels-relative-half-32", "launch"),
    ):
        (tmp_path / f"{name}.o.ptxas").write_text(EXAMPLE)
    found = {(one.products, one.element, one.width, one.v_width) for one in reports(tmp_path)}
    assert found == {
        *(("", "float", 96, 0), ("", "bfloat16", 192, 128), ("relative-", "half", 32, 0)),
        ("", "", 0, 0),
    }
    assert "forward_kernel, bfloat16 192/128, sm_90a: 168 registers" in str(reports(tmp_path)[2])


def test_warnings_and_advisories_are_found(tmp_path: Path) -> None:
    report = tmp_path / "kernels-half-64-64.o.ptxas"
    report.write_text(EXAMPLE)
    assert diagnostics(tmp_path) == []
    serialized = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions"
    report.write_text(f"{EXAMPLE}{serialized}\nptxas warning : Registers are spilled\n")
    assert len(diagnostics(tmp_path)) == 2


@pytest.fixture(scope="module")
def built() -> list[Resources]:
    if not CHIPS:
        pytest.skip("needs CUDA kernels: the extension was built without nvcc")
    if not FOLDER.is_dir():
        pytest.skip(f"needs the build folder, and there is no {FOLDER}")
    return reports(FOLDER)


@pytest.mark.exhaustive
def test_every_architecture_has_every_kernel(built: list[Resources]) -> None:
    everywhere = [one for one in built if not one.v_width]
    units = {(one.products, one.element, one.width) for one in everywhere} - {("", "", 0)}
    assert units == {
        (prefix, element.lower(), width)
        for prefix, widths in WIDTHS.items()
        for element in ELEMENTS
        for width in widths
    }
    have = defaultdict(set)
    for one in everywhere:
        have[one.kernel, one.products, one.element, one.width].add(one.architecture)
    for kernel, architectures in have.items():
        assert architectures >= set(CHIPS), kernel


@pytest.fixture
def hopper(built: list[Resources]) -> list[Resources]:
    if HOPPER_CODE not in ARCHITECTURES:
        pytest.skip("needs kernels for Hopper: the extension was built without them")
    return [one for one in built if one.v_width]


@pytest.mark.exhaustive
def test_hopper_has_every_sm90_kernel(hopper: list[Resources]) -> None:
    assert {one.architecture for one in hopper} == {HOPPER_CODE}
    assert {(one.kernel, one.element, one.width, one.v_width) for one in hopper} >= {
        (kernel, element.lower(), *widths)
        for kernel in (*MAX_HOPPER_SPILLS, "backward_postprocess_kernel")
        for element in HOPPER_ELEMENTS
        for widths in HOPPER_WIDTHS
    }


@pytest.mark.exhaustive
def test_spills_on_hopper_are_within_bounds(hopper: list[Resources]) -> None:
    assert [str(one) for one in hopper if one.spilled > _max_hopper_spill(one)] == []


def _max_hopper_spill(one: Resources) -> int:
    return MAX_HOPPER_SPILLS.get(one.kernel, {}).get(one.width, 0)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("hopper")
def test_wgmma_products_are_not_serialized() -> None:
    """ptxas reports where it serializes wgmma or inserts a missing fence."""
    assert diagnostics(FOLDER) == []


@pytest.mark.exhaustive
def test_spills_of_common_widths_are_within_bounds(built: list[Resources]) -> None:
    halves = [one for one in built if one.element in ("half", "bfloat16") and not one.v_width]
    common = [one for one in halves if one.width in MAX_SPILLS and one.architecture in CHIPS]
    for products, kernels in KERNELS_OF.items():
        assert {one.kernel for one in common if one.products == products} >= kernels
    assert _spilling(common) == []


def _spilling(kernels: Iterable[Resources]) -> list[str]:
    """Kernels of 16-bit types that spill more than their bounds."""
    return [str(one) for one in kernels if one.spilled > _max_spill(one)]


def _max_spill(one: Resources) -> int:
    if one.products == "linear-":
        return MAX_LINEAR_SPILLS
    if one.products:
        return 0
    return max(MAX_SPILLS[one.width], MAX_SPILLS_64.get(one.kernel, 0))


EXTRA_UNITS = {
    "bfloat16-64": (),
    "half-128": ((8, 6),),
    "float-64": ((8, 6),),
    "relative-half-64": (),
    "relative-half-128": ((8, 6),),
    "linear-bfloat16-64": ((8, 6),),
}
"""Capabilities to compile each unit for, if they are not built. Empty: all default capabilities."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", EXTRA_UNITS)
def test_units_compile_for_architectures_that_are_not_built(variant: str, tmp_path: Path) -> None:
    """Covers the default architectures when TORCH_CUDA_ARCH_LIST names only some."""
    try:
        toolkit = find_toolkit(os.environ)
    except NoCudaError as reason:
        pytest.skip(str(reason))
    default = default_chips(toolkit)
    asked = EXTRA_UNITS[variant] or default.capabilities
    others = tuple(one for one in asked if code(one) not in CHIPS)
    if not others:
        pytest.skip("these architectures are built, and the tests above cover them")
    cuda = CudaBuild(toolkit, replace(default, capabilities=others, ptx=False))
    flags = cuda.chips.flags
    units = (*kernel_units("nvcc", flags, False), *linear_units("nvcc", flags))
    (unit,) = (one for one in units if one.variant == variant)
    target = ("-c", str(ROOT / unit.source), "-o", str(tmp_path / "kernels.o"))
    command = [*cuda.nvcc(("c++",)), *unit.flags, *target]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    *kind, element, width = variant.split("-")
    products = "".join(f"{one}-" for one in kind)
    found = list(parse(result.stdout + result.stderr, element, int(width), 0, products))
    assert {one.architecture for one in found} == set(map(code, others))
    assert {one.kernel for one in found} >= KERNELS_OF[products]
    if element != "float":
        assert _spilling(found) == []


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDS R2, [R3] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/              @!P0 BRA 0x80 ;
        /*0040*/                   FSEL R4, R4, R5, P1 ;
        /*0050*/                   FSEL R5, R4, R5, P1 ;
        /*0060*/               @P2 BRA 0x40 ;
        /*0070*/                   FMUL R4, R4, R5 ;
        /*0080*/                   BRA P1, 0xd0 ;
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*00a0*/               @P3 CALL.REL.NOINC 0xf0 ;
        /*00b0*/                   BRA 0x10 ;
        /*00c0*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*00d0*/                   NOP ;
        /*00e0*/                   BRA 0xb0 ;
        /*00f0*/                   EXIT ;
"""
"""A loop from 0x10 to 0xb0: with an inner loop that selects, and a part without the second product
that is placed after it."""


def test_path_has_all_products_and_avoids_the_rest() -> None:
    loop = sass.main_loop(sass.instructions_of(LISTING))
    assert [one.operation for one in loop.instructions] == [
        *("LDS", "HMMA", "BRA", "BRA", "HMMA", "CALL", "BRA")
    ]
    assert loop.products == loop.counts["HMMA"] == 2
    assert len(loop) == 7


def test_exit_is_not_a_path() -> None:
    """Without the jump back at 0xb0, only the inner loop is left, and it has no products."""
    with pytest.raises(sass.NoLoopError):
        sass.main_loop(sass.instructions_of(LISTING.replace("BRA 0x10 ;", "EXIT ;")))


def test_kernels_are_found_by_name_and_architecture() -> None:
    function = f"\t\tFunction : _ZN2tk4cuda15backward_kernelINS0_4HalfELi64EEEvx\n{LISTING}"
    helper = "\t\tFunction : _ZN2tk4cudaL12clear_kernelEPjl\n/*0000*/ EXIT ;\n"
    listing = f"\tcode for sm_80\n{function}{helper}\tcode for sm_90\n{helper}{function}"
    loops = sass.main_loops(listing)
    assert [*loops] == [("backward_kernel", "sm_80"), ("backward_kernel", "sm_90")]
    assert {len(loop) for loop in loops.values()} == {7}


def test_way_to_an_operation_avoids_the_rest() -> None:
    """Before the first FMUL or NOP."""
    code = sass.instructions_of(LISTING)
    assert len(sass.listed_before(code, "FMUL")) == 7
    assert [one.operation for one in sass.shortest_path_to(code, "NOP")] == [
        *("MOV", "LDS", "HMMA", "BRA", "BRA")
    ]


BOUNDS = {
    ("bfloat16-64", "sm_90"): {"forward_kernel": 1110, "backward_kernel": 1200},
    ("bfloat16-128", "sm_90"): {"forward_kernel": 790, "backward_kernel": 1000},
    ("bfloat16-64-64", HOPPER_CODE): {
        "forward_kernel": 460,
        "backward_kernel": 830,
        "dropout_backward_kernel": 1450,
    },
    ("bfloat16-128-128", HOPPER_CODE): {
        "forward_kernel": 480,
        "backward_kernel": 500,
        "dropout_backward_kernel": 810,
    },
    ("bfloat16-192-128", HOPPER_CODE): {
        "forward_kernel": 500,
        "backward_kernel": 700,
        "dropout_backward_kernel": 1130,
    },
    ("bfloat16-256-256", HOPPER_CODE): {
        "forward_kernel": 370,
        "backward_kernel": 490,
        "dropout_backward_kernel": 650,
    },
}
"""Instructions per warp and tile that is not masked, by unit: some 5% above the counts in
docs/cuda.md and docs/hopper.md. Mask tests or options on this path would exceed them."""

MAX_MOVED_ADDRESSES = 16
"""R2UR, which moves an address or a state to a uniform register, on this path of Hopper's kernels:
in the wrong order of products there were 108 (docs/hopper.md, section 4)."""

MAX_SPILLS_WITH_DROPOUT = 36
"""Spilled values that this path stores and loads; without dropout there are none."""


@pytest.mark.exhaustive
@each(("variant", "architecture"), BOUNDS)
def test_main_loops_are_within_bounds(variant: str, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        pytest.skip(f"needs kernels for {architecture}, which the extension was built without")
    (unit,) = FOLDER.rglob(f"kernels-{variant}.o")
    loops = sass.main_loops(cuobjdump("-sass", str(unit)))
    for kernel, bound in BOUNDS[variant, architecture].items():
        loop = loops[kernel, architecture]
        assert len(loop) <= bound, kernel
        if architecture == HOPPER_CODE:
            most = MAX_SPILLS_WITH_DROPOUT if kernel == "dropout_backward_kernel" else 0
            assert loop.counts["LDL"] + loop.counts["STL"] <= most, f"{kernel} spills"
            assert loop.counts["R2UR"] <= MAX_MOVED_ADDRESSES, kernel


@dataclass(frozen=True, kw_only=True)
class DecodeBounds:
    """Most instructions of the kernels of decoding: some 5% above the counts in docs/cuda.md,
    section 4."""

    listed: int = 590
    """before the first copy, in the listing"""
    executed: int = 370
    """on the shortest way to the first copy"""
    tile: int
    """per tile, with 64 rows of queries"""
    combine: int
    """of the second kernel"""
    combine_start: int = 40
    """of the second kernel, before its first exit"""


DECODE_BOUNDS = {
    "bfloat16-64": DecodeBounds(tile=710, combine=760),
    "bfloat16-128": DecodeBounds(tile=880, combine=790),
    "bfloat16-256": DecodeBounds(tile=1110, combine=890),
}


@pytest.mark.exhaustive
@each("variant", DECODE_BOUNDS)
def test_decoding_starts_within_bounds(variant: str) -> None:
    """Neither kernel calls a function, such as a 64-bit division, before its first copy or exit."""
    architecture = "sm_90"
    if architecture not in ARCHITECTURES:
        pytest.skip(f"needs kernels for {architecture}, which the extension was built without")
    (unit,) = FOLDER.rglob(f"kernels-{variant}.o")
    listing = cuobjdump("-sass", str(unit))
    kernels, bounds = sass.kernels(listing), DECODE_BOUNDS[variant]
    decode = kernels["decode_kernel", architecture]
    combine = kernels["decode_combine_kernel", architecture]
    listed = sass.listed_before(decode, "LDGSTS")
    start = sass.listed_before(combine, "EXIT")
    assert len(listed) <= bounds.listed
    assert len(sass.shortest_path_to(decode, "LDGSTS")) <= bounds.executed
    assert len(sass.main_loop(decode)) <= bounds.tile
    assert len(combine) <= bounds.combine
    assert len(start) <= bounds.combine_start
    assert "CALL" not in {one.operation for one in (*listed, *start)}
