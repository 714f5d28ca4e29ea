"""Runs the quick tests with an installed wheel, in a fresh environment: `make test-wheel`.

    python -m building.wheel_tests [--wheel FILE] [--torch 2.15.0] [-- pytest arguments]

The environment has the wheel with its extra `test`, and a torch that may differ from the one that
it was built with. Remove build/wheel_tests for a fresh one. The tests come from the source archive
beside the wheel, whose package is replaced by the installed one. This module needs the standard
library and pip only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheel_tests"
PACKAGE = "transformer_kernels"
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def newest_wheel(folder: Path = ROOT / "dist") -> Path:
    """The wheel that was built last. Raises FileNotFoundError without one."""
    wheels = sorted(folder.glob("*-abi3-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise FileNotFoundError(f"{folder} has no wheel; `make wheel` builds it")
    return wheels[-1]


def source_archive(wheel: Path) -> Path:
    """The source archive beside the wheel. Raises FileNotFoundError if it does not exist."""
    version = wheel.name.split("-")[1].partition("+")[0]
    archive = wheel.with_name(f"{PACKAGE}-{version}.tar.gz")
    if not archive.is_file():
        raise FileNotFoundError(f"{archive} does not exist; `make wheel` builds it")
    return archive


def environment(folder: Path, wheel: Path, torch: str) -> Path:
    """Installs the wheel with its extra `test` and a torch into a virtual environment in `folder`.

    An environment that is there already is used again. Returns its Python. Raises
    CalledProcessError if pip cannot install the packages.
    """
    program = folder / "bin/python"
    if not program.exists():
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(program), "install", "--quiet"]
    subprocess.run([*pip, f"{wheel}[test]", torch], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)
    return program


def tree(folder: Path, archive: Path, program: Path) -> Path:
    """Unpacks the source archive into `folder`, with the package that `program` has installed."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as contents:
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            contents.extraction_filter = tarfile.data_filter
        contents.extractall(folder)
    (root,) = folder.iterdir()
    packages = subprocess.run([program, "-c", _PURELIB], capture_output=True, text=True, check=True)
    shutil.rmtree(root / PACKAGE)
    (root / PACKAGE).symlink_to(Path(packages.stdout.strip()) / PACKAGE)
    return root


def run(wheel: Path, torch: str, pytest_arguments: Sequence[str]) -> int:
    """Installs and tests the wheel. Returns pytest's exit status."""
    name = "python{}.{}".format(*sys.version_info[:2]) + f"-torch-{torch or 'newest'}"
    requirement = f"torch=={torch}" if torch else "torch"
    program = environment(WORK / name / "environment", wheel.resolve(), requirement)
    root = tree(WORK / name / "source", source_archive(wheel), program)
    tests = pytest_arguments or ("tests", "--tier", "quick", "--allow-skips", "-n", "auto")
    path = os.pathsep.join([str(program.parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [program, "-m", "pytest", *tests], cwd=root, env=os.environ | {"PATH": path}, check=False
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m building.wheel_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wheel", type=Path, help="default: the last one in dist")
    parser.add_argument("--torch", default="", help="version of torch; default: the newest")
    parser.add_argument("pytest_arguments", nargs="*", help="default: the tests of `make test`")
    options = parser.parse_args()
    try:
        wheel = options.wheel or newest_wheel()
        status = run(wheel, options.torch, options.pytest_arguments)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    sys.exit(status)


if __name__ == "__main__":
    main()
