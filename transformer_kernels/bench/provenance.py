"""Provenance of a measurement: date, commit, device and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

Device = torch.device
CPU = Device("cpu")

ROWS = "benchmarks/results"
"""Folder of recorded rows, relative to the root of a clone."""

_CPUINFO = Path("/proc/cpuinfo")
_WIDEST_FIRST = (("amx_bf16", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"))
"""Flags of /proc/cpuinfo, and the suffix of `device_slug` for each."""
_FAMILIES = ("xeon", "epyc", "ryzen", "threadripper", "core", "neoverse", "graviton", "apple")


@dataclass(frozen=True)
class Provenance:
    """Columns that all rows of one run share."""

    date: str
    """UTC, ISO 8601, to the second"""
    commit: str
    """abbreviated hash, with + if tracked files have changed; empty outside a clone"""
    device: str
    torch: str
    triton: str
    """version; empty if not installed"""
    cuda: str
    """CUDA version that torch was built for; empty for a CPU build"""
    threads: int

    @staticmethod
    def now() -> Provenance:
        """Returns the provenance of a run on the CPU that starts now."""
        return Provenance(
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=commit_of(Path(__file__).parents[2]),
            device=device_slug(),
            torch=torch.__version__,
            triton=_installed("triton"),
            cuda=torch.version.cuda or "",
            threads=torch.get_num_threads(),
        )

    def on(self, device: Device) -> Provenance:
        """Returns the provenance of the same run for workloads on another device."""
        return replace(self, device=device_slug(device))


def device_slug(device: torch.device = CPU) -> str:
    """Returns a device name for use as a folder name: `xeon-amx`, `aarch64`, `nvidia-h200`.

    CPU: the processor family if the model name contains a known one, else the architecture,
    followed by the widest available of amx, avx512 and avx2. GPU: the driver's device name, in
    lower case, with hyphens.
    """
    if device.type == "cuda":
        return re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    text = _CPUINFO.read_text(errors="replace") if _CPUINFO.is_file() else ""
    return slug_of(text, platform.machine())


def slug_of(cpuinfo: str, machine: str) -> str:
    """Returns the `device_slug` of a CPU from the text of /proc/cpuinfo and the architecture."""
    model = _field(cpuinfo, "model name").lower()
    words = re.findall(r"[a-z]+", model)
    family = next((name for name in _FAMILIES if name in words), machine.replace("_", "-").lower())
    flags = set(_field(cpuinfo, "flags").split())
    widest = next((label for flag, label in _WIDEST_FIRST if flag in flags), None)
    return family if widest is None else f"{family}-{widest}"


def _field(cpuinfo: str, wanted: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return value.strip()
    return ""


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit_of(root: Path) -> str:
    """Returns the abbreviated commit of the clone with this root, or "" if `root` is not a clone.

    A trailing "+" marks changes in tracked files. Changes in recorded rows are ignored, because
    recording one suite would otherwise mark the rows of the next.
    """
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    commit = _git(root, "describe", "--always", "--exclude=*")
    changed = _git(root, "status", "--porcelain", "-uno", "--", ".", f":!{ROWS}")
    return commit + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip()
