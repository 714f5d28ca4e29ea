"""The units that nvcc makes: where it is, and for which chips it compiles."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from setuptools.errors import PlatformError

from building.host import stable_abi
from building.tools import Torch
from building.unit import Unit

Capability = tuple[int, int]

MINIMUM_CUDA = (12, 1)
"""The first whose nvcc compiles C++20, and whose PTX has red of four floats"""

MINIMUM_CAPABILITY: Capability = (8, 0)
"""mma.sync of bfloat16, cp.async"""

DEFAULT_CHIPS: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))

LARGE_SHARED: frozenset[Capability] = frozenset(
    {(8, 0), (8, 7), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0)}
)
"""Chips with 163 KiB of shared memory a block or more. Others have 99, as far as is known."""

WIDTHS = (32, 64, 96, 128, 192, 256)
"""kWidths in csrc/cuda/tile_config.h"""

ELEMENTS = ("Half", "BFloat16", "float")
"""Types of C++"""

HOPPER: Capability = (9, 0)
HOPPER_CODE = "sm_90a"
"""For instructions that only chips of 9.0 have; code for sm_90 runs there too, without them. Every
nvcc that knows the one knows the other, and lists the one alone."""

HOPPER_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Of q and k, and of v; csrc/cuda/sm90/kernels_for.cpp has the same."""

HOPPER_ELEMENTS = ("Half", "BFloat16")

OPERATORS = ("csrc/cuda/operators.cpp", "csrc/cuda/decode_operators.cpp")

NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
    *("-Xptxas", "-v"),  # registers and spills, into a file beside the object
)


class NoCudaError(Exception):
    """Why there will be no CUDA kernels, for people."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit."""

    nvcc: str
    home: Path
    """The folder that has include/cuda.h"""
    version: str
    codes: frozenset[str]
    """What nvcc compiles for: sm_80, compute_80, ..."""

    @property
    def runtime(self) -> Path:
        """The static CUDA runtime."""
        name = "libcudart_static.a"
        places = (self.home / "lib64", self.home / "lib", *self.home.glob("targets/*/lib"))
        for place in places:
            if (place / name).is_file():
                return place / name
        raise PlatformError(f"{name} is not in {self.home}: install CUDA's development files")


@dataclass(frozen=True)
class Chips:
    """What kernels are compiled for."""

    capabilities: tuple[Capability, ...]
    ptx: bool
    """Also code that drivers compile for chips yet to come"""
    passed_over: tuple[Capability, ...] = ()
    """Asked for, but too old"""
    hopper: bool = False
    """Also the kernels of csrc/cuda/sm90"""

    @property
    def architectures(self) -> tuple[str, ...]:
        """As build_info() names them."""
        codes = map(code, self.capabilities)
        hopper = (HOPPER_CODE,) if self.hopper else ()
        return (*codes, *hopper, *(("compute_86",) if self.ptx else ()))

    @property
    def flags(self) -> tuple[str, ...]:
        """Kernels of sm80 are translated twice: with tiles for 163 KiB of shared memory, and 99.

        PTX is of the second kind whatever the chips, for it must run on any.
        """
        large = [code(one) for one in self.capabilities if one in LARGE_SHARED]
        small = [code(one) for one in self.capabilities if one not in LARGE_SHARED]
        small += ["compute_86"] if self.ptx else []
        return (*_gencode("compute_80", large), *_gencode("compute_86", small))

    @property
    def hopper_flags(self) -> tuple[str, ...]:
        return _gencode("compute_90a", [HOPPER_CODE] if self.hopper else [])


def code(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def _gencode(virtual: str, codes: Sequence[str]) -> tuple[str, ...]:
    return ("-gencode", f"arch={virtual},code=[{','.join(codes)}]") if codes else ()


def find_toolkit(environ: Mapping[str, str]) -> Toolkit:
    """In CUDA_HOME, else CUDA_PATH, else where nvcc is on PATH.

    Raises NoCudaError if there is none or it is too old, PlatformError if a variable leads nowhere.
    """
    nvcc, home = _find_nvcc(environ)
    release = re.search(r"release (\d+)\.(\d+)", _output(nvcc, "--version"))
    if release is None:
        raise PlatformError(f"{nvcc} --version does not tell its release")
    version = ".".join(release.groups())
    if tuple(map(int, release.groups())) < MINIMUM_CUDA:
        minimum = ".".join(map(str, MINIMUM_CUDA))
        raise NoCudaError(f"CUDA {version} in {home} is too old, {minimum} is the first that works")
    return Toolkit(nvcc, home, version, frozenset(_output(nvcc, "--list-gpu-code").split()))


def _find_nvcc(environ: Mapping[str, str]) -> tuple[str, Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := environ.get(variable):
            home = Path(folder)
            if not (home / "bin/nvcc").is_file():
                raise PlatformError(f"{variable} is {folder!r}, in which there is no bin/nvcc")
            return str(home / "bin/nvcc"), home
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    if nvcc is None:
        raise NoCudaError("no nvcc on PATH, and neither CUDA_HOME nor CUDA_PATH is set")
    return nvcc, _home_of(nvcc)


def _home_of(nvcc: str) -> Path:
    """nvcc on PATH may be a link, or a script that calls the real one, which knows where it is."""
    told = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", "/dev/null"), re.M)
    places = [Path(told[1].strip())] if told else []
    for home in (*places, Path(nvcc).resolve().parents[1]):
        if (home / "include/cuda.h").is_file():
            return home.resolve()
    raise NoCudaError(f"{nvcc} is there, but not its include/cuda.h; set CUDA_HOME")


def _output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PlatformError(f"{shlex.join(command)} fails: {result.stderr.strip()}")
    return result.stdout + result.stderr


def chips_for(environ: Mapping[str, str], toolkit: Toolkit) -> Chips:
    """TORCH_CUDA_ARCH_LIST, such as "8.0;9.0+PTX", or else what most people have.

    Raises PlatformError for what it or nvcc does not know, NoCudaError if nothing remains.
    """
    text = environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not text:
        known = tuple(one for one in DEFAULT_CHIPS if code(one) in toolkit.codes)
        return Chips(known, ptx=True, hopper=HOPPER in known)
    asked, ptx = parse_arch_list(text)
    passed_over = tuple(one for one in asked if one < MINIMUM_CAPABILITY)
    wanted = tuple(one for one in asked if one >= MINIMUM_CAPABILITY)
    for one in wanted:
        if code(one) not in toolkit.codes:
            raise PlatformError(
                f"TORCH_CUDA_ARCH_LIST is {text!r}, and nvcc of CUDA {toolkit.version} does not "
                f"compile for {code(one)}"
            )
    if not wanted:
        raise NoCudaError(
            f"TORCH_CUDA_ARCH_LIST is {text!r}, and they need compute capability "
            "{}.{} or later".format(*MINIMUM_CAPABILITY)
        )
    return Chips(wanted, ptx, passed_over, hopper=HOPPER in wanted)


def parse_arch_list(text: str) -> tuple[tuple[Capability, ...], bool]:
    """What is asked for, ascending, and whether PTX is.

    "9.0a" is "9.0": what the a stands for is used where it is. The f of "10.0f" is not used yet.
    """
    capabilities, ptx = set(), False
    for item in text.replace(";", " ").split():
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", item)
        if match is None:
            raise PlatformError(
                f"TORCH_CUDA_ARCH_LIST has {item!r}; expected compute capabilities such as "
                "'8.0;9.0+PTX', or 'none'"
            )
        capabilities.add((int(match[1]), int(match[2])))
        ptx = ptx or match[3] is not None
    return tuple(sorted(capabilities)), ptx


@dataclass(frozen=True)
class CudaBuild:
    toolkit: Toolkit
    chips: Chips

    def nvcc(self, cxx: Sequence[str]) -> tuple[str, ...]:
        """The command, which compiles host code by the same C++ compiler as everything else."""
        return (self.toolkit.nvcc, *_host_compiler(cxx), *NVCC_FLAGS)

    @property
    def definitions(self) -> tuple[str, ...]:
        """For build_info()."""
        return (
            f'-DTK_CUDA_VERSION="{self.toolkit.version}"',
            f'-DTK_CUDA_ARCHITECTURES="{" ".join(self.chips.architectures)}"',
        )

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The runtime is ours alone: it neither serves nor takes from the one that torch loads."""
        archive = self.toolkit.runtime
        return (str(archive), f"-Wl,--exclude-libs,{archive.name}", "-lrt", "-ldl", "-lpthread")


def _host_compiler(cxx: Sequence[str]) -> tuple[str, ...]:
    launchers = ("ccache", "sccache", "distcc")
    program, *flags = [word for word in cxx if Path(word).name not in launchers]
    options = ("-Xcompiler", ",".join(flags)) if flags else ()
    return ("-ccbin", program, *options)


def find_cuda(environ: Mapping[str, str]) -> CudaBuild:
    """Raises NoCudaError with the reason if there will be no CUDA kernels."""
    if environ.get("TORCH_CUDA_ARCH_LIST", "").strip().lower() == "none":
        raise NoCudaError("TORCH_CUDA_ARCH_LIST is 'none'")
    toolkit = find_toolkit(environ)
    return CudaBuild(toolkit, chips_for(environ, toolkit))


def cuda_units(torch: Torch, chips: Chips) -> tuple[Unit, ...]:
    """Every object of csrc/cuda."""
    return (
        *(Unit(source, stable_abi(torch)) for source in OPERATORS),
        *kernel_units("nvcc", chips.flags, chips.hopper),
        *(hopper_units("nvcc", chips.hopper_flags) if chips.hopper else ()),
    )


Compiler = Literal["c++", "nvcc"]


def kernel_units(compiler: Compiler, flags: tuple[str, ...], hopper: bool) -> tuple[Unit, ...]:
    """The kernels for any chip, and what launches all of them, Hopper's too if there are."""
    return (
        Unit("csrc/cuda/launch.cu", (*flags, *(("-DTK_SM90",) if hopper else ())), "", compiler),
        *(
            Unit(
                "csrc/cuda/sm80/kernels.cu",
                (*flags, f"-DTK_ELEMENT={element}", f"-DTK_WIDTH={width}"),
                f"{element.lower()}-{width}",
                compiler,
            )
            for element in ELEMENTS
            for width in WIDTHS
        ),
    )


def hopper_units(compiler: Compiler, flags: tuple[str, ...]) -> tuple[Unit, ...]:
    """The kernels of csrc/cuda/sm90."""
    return (
        Unit("csrc/cuda/sm90/kernels_for.cpp"),
        *(
            Unit(
                "csrc/cuda/sm90/kernels.cu",
                (
                    *(*flags, f"-DTK_ELEMENT={element}"),
                    *(f"-DTK_WIDTH={width}", f"-DTK_V_WIDTH={v_width}"),
                ),
                f"{element.lower()}-{width}-{v_width}",
                compiler,
            )
            for element in HOPPER_ELEMENTS
            for width, v_width in HOPPER_WIDTHS
        ),
    )
