"""Builds and runs the C++ programs of tests/kernels/cuda/programs in the emulator."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from building.extension import ROOT
from building.ninja import available_cores

EMULATOR = ROOT / "csrc/emulator"
KERNELS = ROOT / "tests/kernels/cuda/programs"
FLAGS = (
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-iquote", str(EMULATOR), f"-I{ROOT / 'csrc'}"),
)
SEEDS = range(8)


@dataclass(frozen=True)
class Programs:
    """Test programs, built in `folder`, which several processes may share."""

    folder: Path
    compiler: tuple[str, ...]

    def run(
        self, program: str, case: str, *, seeds: Sequence[int] = SEEDS, races: bool = False
    ) -> list[str]:
        """Runs `case` of `program`. Returns one line for each seed: "ok", or an error message."""
        command = [str(self._program(program, races)), case, *(("races",) if races else ())]
        result = subprocess.run(
            [*command, *map(str, seeds)], capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert len(lines) == len(seeds), result.stdout
        return lines

    def _program(self, name: str, races: bool) -> Path:
        path = self.folder / (f"{name}-races" if races else name)
        with _one_at_a_time(path):
            if not path.exists():
                objects = self._emulator()
                own = self._compile(KERNELS / f"{name}.cpp", f"{path.name}.o", races)
                self._call([*map(str, (own, *objects)), "-ldl", "-o", f"{path}.new"])
                Path(f"{path}.new").rename(path)
        return path

    def _emulator(self) -> list[Path]:
        """Objects of the emulator, which are not instrumented: only kernels can race."""
        sources = sorted(EMULATOR.glob("*.cpp"))
        objects = [self.folder / f"emulator-{source.stem}.o" for source in sources]
        with (
            _one_at_a_time(self.folder / "emulator"),
            ThreadPoolExecutor(available_cores()) as pool,
        ):
            if not all(path.exists() for path in objects):
                list(pool.map(self._compile, sources, [path.name for path in objects]))
        return objects

    def _compile(self, source: Path, name: str, races: bool = False) -> Path:
        path = self.folder / name
        flags = (*FLAGS, *(("-fsanitize=thread",) if races else ()))
        self._call([*flags, "-c", str(source), "-o", str(path)])
        return path

    def _call(self, arguments: Sequence[str]) -> None:
        command = [*self.compiler, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
