"""Shapes of attention calls, as given on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORM = "B,H_q,H_kv,M,N,D[,D_v]"
_NAMES = ("B", "H_q", "H_kv", "M", "N", "D", "D_v")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call."""

    B: int
    H_q: int
    H_kv: int
    M: int
    N: int
    D: int
    D_v: int

    def __post_init__(self) -> None:
        for name in _NAMES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.H_q % self.H_kv:
            raise ValueError(f"H_q must be a multiple of H_kv, got {self.H_q} and {self.H_kv}")

    @staticmethod
    def parse(text: str) -> Shape:
        """Parses "B,H_q,H_kv,M,N,D" or "B,H_q,H_kv,M,N,D,D_v"; D_v is D by default.

        Raises:
            ValueError: the text has another form, or a size is not valid.
        """
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+){5,6}\s*", text, re.ASCII):
            raise ValueError(f"expected {FORM}, such as 1,32,8,2048,2048,128, got {text!r}")
        sizes = [int(word) for word in text.split(",")]
        if len(sizes) == len(_NAMES) - 1:
            sizes.append(sizes[-1])
        return Shape(**dict(zip(_NAMES, sizes, strict=True)))

    def __str__(self) -> str:
        heads = f"{self.H_q}" if self.H_q == self.H_kv else f"{self.H_q}/{self.H_kv}"
        lengths = f"{self.M}" if self.M == self.N else f"{self.M} x {self.N}"
        width = f"{self.D}" if self.D_v == self.D else f"{self.D}/{self.D_v}"
        return f"B {self.B}, H {heads}, S {lengths}, D {width}"
