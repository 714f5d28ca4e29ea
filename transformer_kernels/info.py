"""Report on the installation: versions, devices, compiled kernels and missing components."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .backends import BACKENDS
from .backends.native import direct, extension
from .common import torch_private
from .version import __version__

EXTENSION = "transformer_kernels._C"
TRAIN_PACKAGES = ("rich", "matplotlib", "safetensors")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class BackendStatus:
    """Availability of a backend. `reason` is None if it can run on this machine."""

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'available'}"


@dataclass(frozen=True)
class Build:
    """Build configuration of the compiled extension, and the instruction set in use."""

    compiler: str
    cxx_standard: str
    torch: str
    minimum_torch: str
    isas: tuple[str, ...]
    isa: str
    cpu_features: tuple[str, ...]
    cuda: str
    cuda_architectures: tuple[str, ...]


@dataclass(frozen=True)
class Info:
    """Result of `info()`. `str(info())` is a readable report."""

    version: str
    python: str
    torch: str
    triton: str | None
    cpu: str
    threads: int
    devices: tuple[str, ...]
    build: Build | None
    """None if the compiled extension is missing or fails to load."""
    backends: tuple[BackendStatus, ...]
    fast_path: str | None
    """Reason why the fast path is disabled; None if it is enabled."""
    missing: tuple[str, ...]
    """Missing components, each with install instructions."""

    def __str__(self) -> str:
        rows = [
            ("Python", self.python),
            ("torch", f"{self.torch}, {self.threads} threads"),
            ("triton", self.triton or "not installed"),
            ("CPU", self.cpu),
            *(("device", device) for device in self.devices),
            *_build_rows(self.build),
            *(("backend", str(backend)) for backend in self.backends),
            ("fast path", "on" if self.fast_path is None else f"off: {self.fast_path}"),
            *(("missing", text) for text in self.missing or ("nothing",)),
        ]
        lines = [f"transformer_kernels {self.version}"]
        label_before = ""
        for label, text in rows:
            lines.append(f"  {'' if label == label_before else label:<13}{text}")
            label_before = label
        return "\n".join(lines)


def info() -> Info:
    """Reports versions, devices, CPU features, compiled kernels and missing components.

    `python -m transformer_kernels info` prints the same report.

    Returns:
        An `Info` record; `str()` of it is a readable report. `missing` lists each missing component
        with the command that installs it.
    """
    reason = extension.unavailable_reason()
    build = _build() if reason is None else None
    return Info(
        version=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cpu=_cpu_model(),
        threads=torch.get_num_threads(),
        devices=_devices(),
        build=build,
        backends=tuple(BackendStatus(one.name, one.unavailable_reason()) for one in BACKENDS),
        fast_path=direct.unavailable_reason(),
        missing=(
            *_missing_symbols(),
            *_missing_extension(reason),
            *_missing_cuda(build),
            *_missing_packages(),
        ),
    )


def _build() -> Build:
    compiled = extension.compiled
    built = compiled.build_info()
    return Build(
        compiler=built["compiler"],
        cxx_standard=built["cxx_standard"],
        torch=built["torch"],
        minimum_torch=built["minimum_torch"],
        isas=tuple(built["isas"]),
        isa=compiled.isa(),
        cpu_features=tuple(name for name, present in compiled.cpu_features().items() if present),
        cuda=built["cuda"],
        cuda_architectures=tuple(built["cuda_architectures"]),
    )


def _build_rows(build: Build | None) -> list[tuple[str, str]]:
    if build is None:
        return [("kernels", "not built")]
    return [
        ("CPU features", " ".join(build.cpu_features) or "none used by the kernels"),
        ("CPU kernels", f"{build.isa} in use; built for {', '.join(build.isas)}"),
        ("CUDA kernels", _cuda_kernels(build)),
        (
            "built with",
            f"{build.compiler}, {build.cxx_standard}, torch {build.torch}; "
            f"runs on torch {build.minimum_torch} and later",
        ),
    ]


def _cuda_kernels(build: Build) -> str:
    if not build.cuda_architectures:
        return "not built"
    return f"{', '.join(build.cuda_architectures)}, by CUDA {build.cuda}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f"{value.strip()}, {platform.machine()}"
    return platform.machine()


def _devices() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ("cpu",)
    gpus = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return (
        "cpu",
        *(f"cuda:{i} {gpu.name}, sm_{gpu.major}{gpu.minor}" for i, gpu in enumerate(gpus)),
    )


def _missing_symbols() -> list[str]:
    if not torch_private.MISSING:
        return []
    return [
        f"{', '.join(torch_private.MISSING)} in torch {torch.__version__}: upgrade "
        "transformer_kernels, or install an earlier torch"
    ]


def _missing_extension(reason: str | None) -> list[str]:
    if reason is None:
        return []
    if importlib.util.find_spec(EXTENSION) is None:
        return [
            "the compiled CPU kernels: install a C++ compiler (Debian, Ubuntu: apt install g++) "
            "and install transformer_kernels again (in a clone: make build)"
        ]
    return [f"the compiled CPU kernels do not load: install transformer_kernels again; {reason}"]


def _missing_cuda(build: Build | None) -> list[str]:
    """Reports missing CUDA kernels, only on machines with a GPU."""
    if build is None or build.cuda_architectures or not torch.cuda.is_available():
        return []
    return [
        "the CUDA kernels: install a CUDA toolkit, 12.1 or later, or set CUDA_HOME to one, and "
        "install transformer_kernels again (in a clone: make build)"
    ]


def _missing_packages() -> list[str]:
    absent = [name for name in TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    return [
        f"{' and '.join(absent)}, for progress bars, pictures and published weights: "
        "pip install 'transformer_kernels[train]'"
    ]
