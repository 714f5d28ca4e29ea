"""Compilation units."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal


@dataclass(frozen=True)
class Unit:
    """One object file: a source, its own flags, and a name for this variant of the source."""

    source: str
    flags: tuple[str, ...] = ()
    variant: str = ""
    compiler: Literal["c++", "nvcc"] = "c++"

    @property
    def object_name(self) -> str:
        """Path of the object file, relative to the build folder."""
        stem = PurePosixPath(self.source).with_suffix("")
        return f"{stem}{f'-{self.variant}' if self.variant else ''}.o"
