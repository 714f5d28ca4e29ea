"""CUDA build: choice of the toolkit and the chips, flags of nvcc, and units."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from setuptools.errors import PlatformError

from building import cuda
from building.chips import (
    ARCH_LIST,
    Chips,
    chips_for,
    chips_of_gpus,
    default_chips,
    parse_arch_list,
)
from building.cuda import ELEMENTS, HOPPER_ELEMENTS, CudaBuild, cuda_units, find_cuda, hopper_units
from building.cuda_toolkit import NoCudaError, Toolkit, find_toolkit
from building.extension import report
from building.host import host_units
from building.tile_config import HOPPER_WIDTHS, LINEAR_WIDTHS, RELATIVE_WIDTHS, WIDTHS
from building.tools import Torch, visible_gpus
from building.unit import Unit
from tests.support.tiers import each

TORCH = Torch("2.13.0", Path("torch"))
CODES = frozenset({"sm_75", "sm_80", "sm_86", "sm_87", "sm_90", "compute_80", "compute_86"})
TOOLKIT = Toolkit("nvcc", Path("cuda"), "13.0", CODES)
ALL = Chips(((8, 0), (9, 0), (12, 0)), ptx=True, hopper=True)
FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --list-gpu-code) printf 'sm_80\\nsm_90\\ncompute_80\\n' ;;
  --dryrun) echo '#$ TOP={top}' >&2 ;;
esac
"""


def toolkit_in(folder: Path, release: str = "13.0") -> Path:
    """A fake toolkit; returns its nvcc."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include/cuda.h").touch()
    (folder / "lib64").mkdir()
    (folder / "lib64/libcudart_static.a").touch()
    nvcc = folder / "bin/nvcc"
    nvcc.write_text(FAKE_NVCC.format(release=release, top=folder / "bin/.."))
    nvcc.chmod(0o755)
    return nvcc


def torch_in(folder: Path, *, runs_cuda: bool) -> Torch:
    """A fake installation of torch."""
    (folder / "torch/lib").mkdir(parents=True)
    if runs_cuda:
        (folder / "torch/lib/libtorch_cuda.so").touch()
    return Torch("2.13.0+cu130" if runs_cuda else "2.13.0+cpu", folder / "torch")


def test_cuda_home_precedes_cuda_path_which_precedes_path(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("home", "path", "onpath")]
    for home in homes:
        toolkit_in(home)
    environ = {"PATH": f"{homes[2] / 'bin'}:/usr/bin:/bin"}
    assert find_toolkit(environ).home == homes[2]
    environ["CUDA_PATH"] = str(homes[1])
    assert find_toolkit(environ).home == homes[1]
    environ["CUDA_HOME"] = str(homes[0])
    found = find_toolkit(environ)
    assert (found.nvcc, found.home) == (str(homes[0] / "bin/nvcc"), homes[0])
    assert found.version == "13.0"
    assert found.codes == {"sm_80", "sm_90", "compute_80"}
    assert found.runtime == homes[0] / "lib64/libcudart_static.a"


@pytest.mark.parametrize("kind", ["script", "link"])
def test_nvcc_on_path_resolves_to_its_toolkit(kind: str, tmp_path: Path) -> None:
    """A script that calls the real nvcc, or a link to an nvcc that does not print its home."""
    real, found = toolkit_in(tmp_path / "cuda-13.0"), tmp_path / "bin/nvcc"
    found.parent.mkdir()
    if kind == "script":
        found.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        found.chmod(0o755)
    else:
        real.write_text(real.read_text().replace("TOP", "BOTTOM"))
        found.symlink_to(real)
    toolkit = find_toolkit({"PATH": f"{found.parent}:/usr/bin:/bin"})
    assert (toolkit.nvcc, toolkit.home) == (str(found), tmp_path / "cuda-13.0")


def test_missing_nvcc_is_reported_with_a_remedy(tmp_path: Path) -> None:
    installed = torch_in(tmp_path, runs_cuda=True)
    with pytest.raises(NoCudaError, match=r"no nvcc on PATH, and CUDA_HOME and CUDA_PATH") as error:
        find_cuda({"PATH": str(tmp_path), "CUDA_HOME": ""}, installed)
    assert "install a CUDA toolkit, 12.1 or later" in error.value.remedy


def test_nvcc_without_headers_is_not_used(tmp_path: Path) -> None:
    nvcc = toolkit_in(tmp_path / "cuda")
    (tmp_path / "cuda/include/cuda.h").unlink()
    with pytest.raises(NoCudaError, match=r"its include/cuda\.h is missing"):
        find_toolkit({"PATH": f"{nvcc.parent}:/usr/bin:/bin"})


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_variable_naming_a_folder_without_nvcc_is_an_error(variable: str, tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=rf"{variable} is '.*', which has no bin/nvcc"):
        find_toolkit({"PATH": "/usr/bin:/bin", variable: str(tmp_path)})


def test_old_cuda_is_not_used(tmp_path: Path) -> None:
    toolkit_in(tmp_path / "cuda", release="11.8")
    with pytest.raises(NoCudaError, match=r"CUDA 11\.8 in .* is too old: 12\.1 or later"):
        find_toolkit({"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "cuda")})


@pytest.mark.parametrize(
    ("arch_list", "runs_cuda", "gpus", "built"),
    [
        ("none", True, [(9, 0)], "TORCH_CUDA_ARCH_LIST is 'none'"),
        (" None ", True, [(9, 0)], "TORCH_CUDA_ARCH_LIST is 'None'"),
        ("", False, [], "torch 2.13.0+cpu is a CPU build"),
        ("native", False, [], "torch 2.13.0+cpu is a CPU build"),
        ("9.0", False, [], ["sm_90", "sm_90a"]),
        ("8.0", True, [(9, 0)], ["sm_80"]),
        ("", True, [], ["sm_80", "sm_90", "sm_90a", "compute_86"]),
        ("native", True, [], "TORCH_CUDA_ARCH_LIST is 'native', but torch finds no GPU"),
        ("", True, [(9, 0)], ["sm_90", "sm_90a"]),
        ("Native", True, [(7, 5), (8, 0)], ["sm_80"]),
        ("", True, [(7, 5)], "the visible GPUs are sm_75, but the kernels need sm_80 or later"),
    ],
)
def test_chips_are_chosen_from_the_arch_list_torch_and_the_gpus(
    arch_list: str,
    runs_cuda: bool,
    gpus: list[tuple[int, int]],
    built: str | list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This nvcc supports 8.0 and 9.0. `built` is a string if it is the reason for no CUDA build."""
    installed = torch_in(tmp_path, runs_cuda=runs_cuda)
    monkeypatch.setattr(cuda, "visible_gpus", lambda: tuple(gpus))
    nvcc = toolkit_in(tmp_path / "cuda")
    environ = {"PATH": f"{nvcc.parent}:/usr/bin:/bin", ARCH_LIST: arch_list}
    if isinstance(built, list):
        assert list(find_cuda(environ, installed).chips.architectures) == built
        return
    with pytest.raises(NoCudaError, match=re.escape(built)) as error:
        find_cuda(environ, installed)
    assert report("x86_64", error.value)[1:] == [
        f"  not built: CUDA kernels: {built}",
        '             to build them: set TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX", with the compute '
        "capabilities you need",
    ]


def test_gpus_newer_than_nvcc_use_ptx() -> None:
    assert chips_of_gpus([(9, 0), (12, 1)], TOOLKIT) == Chips(((9, 0),), ptx=True, hopper=True)
    assert chips_of_gpus([(12, 1)], TOOLKIT).architectures == ("compute_86",)


def test_visible_gpus_are_those_that_torch_finds() -> None:
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    assert visible_gpus() == tuple(sorted(found))


def test_torch_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("building.tools._VISIBLE_GPUS", "raise ImportError('libcudart')")
    with pytest.raises(PlatformError, match=r"torch cannot list the GPUs: .*libcudart"):
        visible_gpus()


@each(
    ("text", "capabilities", "ptx"),
    [
        ("8.0", ((8, 0),), False),
        ("9.0;8.0+PTX", ((8, 0), (9, 0)), True),
        ("8.0 9.0a", ((8, 0), (9, 0)), False),
        ("8.6; 10.0f+PTX ;12.0", ((8, 6), (10, 0), (12, 0)), True),
        ("9.0 9.0a", ((9, 0),), False),
    ],
)
def test_arch_list(text: str, capabilities: tuple[tuple[int, int], ...], ptx: bool) -> None:
    assert parse_arch_list(text) == (capabilities, ptx)


@each("item", ["Hopper", "90", "sm_90", "9.0x", "8.0,9.0", "9.0+ptx"])
def test_malformed_capability_is_an_error(item: str) -> None:
    with pytest.raises(PlatformError, match=rf"ARCH_LIST has '{re.escape(item)}'; expected comp"):
        parse_arch_list(f"8.0 {item}")


def test_default_chips_are_those_that_nvcc_supports() -> None:
    chips = default_chips(TOOLKIT)
    assert chips == Chips(((8, 0), (8, 6), (9, 0)), ptx=True, hopper=True)
    assert chips.architectures == ("sm_80", "sm_86", "sm_90", "sm_90a", "compute_86")


@each(
    ("asked", "built"),
    [
        ("9.0", ("sm_90", "sm_90a")),
        ("9.0a", ("sm_90", "sm_90a")),
        ("8.0 9.0+PTX", ("sm_80", "sm_90", "sm_90a", "compute_86")),
        ("8.0", ("sm_80",)),
    ],
)
def test_sm90_kernels_are_built_for_capability_9_0(asked: str, built: tuple[str, ...]) -> None:
    """nvcc --list-gpu-code names sm_90 but not sm_90a."""
    chips = chips_for(asked, TOOLKIT)
    assert (chips.architectures, chips.hopper) == (built, "sm_90a" in built)


def test_architectures_are_reported_in_order() -> None:
    assert ALL.architectures == ("sm_80", "sm_90", "sm_120", "sm_90a", "compute_86")
    built = f"CUDA kernels for {', '.join(ALL.architectures)}, by CUDA 13.0 in cuda"
    assert report("x86_64", CudaBuild(TOOLKIT, ALL))[1:] == [
        f"  built:     {built}",
        '             for other chips: set TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"; for none, "none"',
    ]


def test_chips_that_nvcc_does_not_support_are_an_error() -> None:
    with pytest.raises(PlatformError, match=r"nvcc of CUDA 13\.0 does not compile for sm_103"):
        chips_for("8.0 10.3", TOOLKIT)


def test_chips_that_are_too_old_are_skipped_and_reported() -> None:
    build = CudaBuild(TOOLKIT, chips_for("7.5 8.0", TOOLKIT))
    assert build.chips == Chips(((8, 0),), ptx=False, too_old=((7, 5),))
    assert report("x86_64", build)[1:3] == [
        "  built:     CUDA kernels for sm_80, by CUDA 13.0 in cuda",
        "  not built: CUDA kernels for sm_75: they need sm_80 or later",
    ]
    with pytest.raises(NoCudaError, match=r"'7\.0;7\.5', but the kernels need .*capability 8\.0"):
        chips_for("7.0;7.5", TOOLKIT)


def test_kernels_are_compiled_once_per_tile_configuration() -> None:
    assert Chips(((8, 0), (8, 6), (9, 0), (12, 0)), ptx=True).flags == (
        *("-gencode", "arch=compute_80,code=[sm_80,sm_90]"),
        *("-gencode", "arch=compute_86,code=[sm_86,sm_120,compute_86]"),
    )
    assert Chips(((9, 0),), ptx=False).flags == ("-gencode", "arch=compute_80,code=[sm_90]")
    assert Chips(((9, 0),), ptx=True).flags[2:] == ("-gencode", "arch=compute_86,code=[compute_86]")


def test_units_are_compiled_for_their_chips() -> None:
    """Kernels of sm90 are compiled only for sm_90a, and the dispatcher is told if they exist."""
    nvcc_units = [unit for unit in cuda_units(TORCH, ALL) if unit.compiler == "nvcc"]
    for unit in nvcc_units:
        is_sm90 = unit.source == "csrc/cuda/sm90/kernels.cu"
        hopper = ("-gencode", "arch=compute_90a,code=[sm_90a]")
        expected = hopper if is_sm90 else ALL.flags
        assert unit.flags[: len(expected)] == expected
        assert ("sm_90a" in " ".join(unit.flags)) == is_sm90
        assert ("-DTK_SM90" in unit.flags) == (unit.source == "csrc/cuda/dispatch.cu")
    without = Chips(((8, 0), (9, 0)), ptx=True)
    for unit in cuda_units(TORCH, without):
        assert "sm90" not in unit.source
        assert "-DTK_SM90" not in unit.flags


def test_nvcc_uses_the_same_host_compiler() -> None:
    build = CudaBuild(TOOLKIT, Chips(((9, 0),), ptx=False))
    assert build.nvcc(("g++-12",))[:3] == ("nvcc", "-ccbin", "g++-12")
    with_flags = build.nvcc(("/usr/bin/ccache", "clang++", "-m64", "-g"))
    assert with_flags[1:5] == ("-ccbin", "clang++", "-Xcompiler", "-m64,-g")


def test_object_names_are_unique() -> None:
    units: tuple[Unit, ...] = (*host_units("x86_64", TORCH), *cuda_units(TORCH, ALL))
    names = [unit.object_name for unit in units]
    assert len(set(names)) == len(names)


def test_every_width_has_a_unit() -> None:
    """Unused units cost build time, and missing units fail to link."""
    assert WIDTHS == (32, 64, 96, 128, 192, 256)
    chips = Chips(((9, 0),), ptx=False)
    variants = {unit.variant for unit in cuda_units(TORCH, chips)} - {""}
    assert set(RELATIVE_WIDTHS) <= set(WIDTHS)
    assert RELATIVE_WIDTHS[-1] == WIDTHS[-1]
    assert LINEAR_WIDTHS[-1] == WIDTHS[-1]
    widths = (*WIDTHS, *RELATIVE_WIDTHS, *LINEAR_WIDTHS)
    assert len(variants) == len(widths) * len(ELEMENTS)
    assert HOPPER_WIDTHS == ((64, 64), (128, 128), (192, 128), (256, 256))
    variants = {unit.variant for unit in hopper_units("nvcc", ())} - {""}
    assert len(variants) == len(HOPPER_WIDTHS) * len(HOPPER_ELEMENTS)


@pytest.mark.exhaustive
def test_every_default_chip_compiles(tmp_path: Path) -> None:
    """The installed nvcc accepts the flags."""
    try:
        found = find_toolkit(os.environ)
    except NoCudaError as reason:
        pytest.skip(str(reason))
    build = CudaBuild(found, default_chips(found))
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float* x) { x[threadIdx.x] *= 2; }\n")
    flags = (*build.chips.flags, *build.chips.hopper_flags)
    command = [*build.nvcc(("c++",)), *flags, "-c", str(source), "-o", str(tmp_path / "kernel.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    compiled = set(re.findall(r"for '(sm_\d+a?)'", result.stdout + result.stderr))
    assert compiled == set(build.chips.architectures) - {"compute_86"}
