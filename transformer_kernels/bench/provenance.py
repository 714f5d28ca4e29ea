"""Where and with what a measurement was taken."""

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
"""Where rows are kept, below the root of a clone"""

_CPUINFO = Path("/proc/cpuinfo")
_WIDEST_FIRST = (("amx_bf16", "amx"), ("avx512f", "avx512"), ("avx2", "avx2"))
"""Flags of /proc/cpuinfo, and what a device's name says of them."""
_FAMILIES = ("xeon", "epyc", "ryzen", "threadripper", "core", "neoverse", "graviton", "apple")


@dataclass(frozen=True)
class Provenance:
    """The columns that all rows of one run share."""

    date: str
    """UTC, ISO 8601, to the second"""
    commit: str
    """Abbreviated, with + where files were changed since; empty outside a clone"""
    device: str
    torch: str
    triton: str
    """Empty where it is not installed"""
    cuda: str
    """The version torch was built for; empty for a CPU build"""
    threads: int

    @staticmethod
    def now() -> Provenance:
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
        """The same run, of work on this device; `now` says the CPU."""
        return replace(self, device=device_slug(device))


def device_slug(device: torch.device = CPU) -> str:
    """A name for the device that serves as a folder's: `xeon-amx`, `aarch64`, `nvidia-h200`.

    A CPU's is the processor's family, where its model name has a well-known one, or else the
    architecture; then the widest of amx, avx512 and avx2 that it has. A GPU's is the name that its
    driver tells, in lower case and with hyphens.
    """
    if device.type == "cuda":
        return re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    text = _CPUINFO.read_text(errors="replace") if _CPUINFO.is_file() else ""
    return slug_of(text, platform.machine())


def slug_of(cpuinfo: str, machine: str) -> str:
    """A CPU's `device_slug` for the text of a /proc/cpuinfo and the name of an architecture."""
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
    """Of the clone whose root this is; an installed package inside another repository has none.

    "+" behind it: tracked files have changed since. Recorded rows do not count: those of one
    suite would mark those of the next.
    """
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    commit = _git(root, "describe", "--always", "--exclude=*")
    changed = _git(root, "status", "--porcelain", "-uno", "--", ".", f":!{ROWS}")
    return commit + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip()
