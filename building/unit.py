"""One object file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal


@dataclass(frozen=True)
class Unit:
    """A source, the flags that it alone gets, and what tells it from others of this source."""

    source: str
    flags: tuple[str, ...] = ()
    variant: str = ""
    compiler: Literal["c++", "nvcc"] = "c++"

    @property
    def object_name(self) -> str:
        """Relative to the build folder."""
        stem = PurePosixPath(self.source).with_suffix("")
        return f"{stem}{f'-{self.variant}' if self.variant else ''}.o"
