"""Offline compilation of the kernels of linear attention; see backends/triton/compile_report.py."""

from __future__ import annotations

from typing import Any

import torch

from ...backends.triton.compile_report import Constants, Suite
from ...backends.triton.config import Chip
from ..family import BackwardCall
from ..types import Cotangents, Inputs, Options, Saved
from . import launch, tiles
from .kernels.arguments import Sizes

_RESULTS = {(False, False): "o", (False, True): "dq", (True, True): "dk", (True, False): "dv"}
"""Results of `results_kernel` by REVERSE and TRANSPOSED"""


def _launch_all(dtype: torch.dtype, columns: int) -> None:
    """Launches a forward pass, a backward pass and steps, and in half precision, where other tiles
    serve it, the same with the gradient of a decay."""
    q, k, v = (torch.empty(2, 8, 1024, columns, dtype=dtype, device="meta") for _ in range(3))
    decays = [None] if dtype == torch.float32 else [None, torch.empty(2, 8, 1024, device="meta")]
    options = Options("elu", causal=True, normalize=True, eps=1e-6)
    for decay in decays:
        x = Inputs(q, k, v, decay)
        o, normalizer, S, z = launch.forward(x, options)
        saved, flags = Saved(o, normalizer), (decay is not None,)
        launch.backward(BackwardCall(Cotangents(q, None, None), saved, x, options, flags))
        launch.steps(x._replace(S=S, z=z), options)


def _has_tile(chip: Chip, dtype: torch.dtype, columns: int) -> bool:
    return columns <= tiles.WIDTHS[-1]


def _name(kernel: Any, constants: Constants) -> str:
    names: list[str] = kernel.arg_names
    found: str = kernel.__name__.removesuffix("_kernel")
    if found == "results":
        reverse, transposed = (constants[(names.index(n),)] for n in ("REVERSE", "TRANSPOSED"))
        found = _RESULTS[reverse, transposed]
    elif found == "sums":
        found = "sums of dS" if constants[(names.index("REVERSE"),)] else "sums of S"
    decayed = "sizes" in names and _size(names, constants, "DECAYED")
    return f"linear {found}{', decay' if decayed else ''}"


def _tile(kernel: Any, constants: Constants) -> str:
    """Returns CHUNK x SLICE; or the elements of a program of an elementwise kernel."""
    names: list[str] = kernel.arg_names
    if "sizes" not in names:
        return str(constants[(names.index("BLOCK"),)])
    return " x ".join(str(_size(names, constants, field)) for field in ("CHUNK", "SLICE"))


def _size(names: list[str], constants: Constants, field: str) -> Any:
    return constants[names.index("sizes"), Sizes._fields.index(field)].value


LINEAR = Suite(_has_tile, _launch_all, _name, _tile)
"""A forward pass, a backward pass and steps"""
