"""Offline compilation of the kernels of the gated delta rule; see
backends/triton/compile_report.py."""

from __future__ import annotations

from typing import Any

import torch

from ....backends.triton.compile_report import Constants, Suite
from ...family import BackwardCall
from ...triton.report import LINEAR
from ..types import Cotangents, Inputs, Options
from . import launch
from .kernels.arguments import Sizes


def _launch_all(dtype: torch.dtype, columns: int) -> None:
    """Launches a forward pass, a backward pass and steps, with one gate and with one for each
    channel."""
    q, k, v = (torch.empty(2, 8, 1024, columns, dtype=dtype, device="meta") for _ in range(3))
    beta = torch.empty(2, 8, 1024, device="meta")
    for gates in (1, columns):
        log_decay = torch.empty(2, 8, 1024, gates, device="meta")
        x, options = Inputs(q, k, v, log_decay, beta), Options(scale=1.0, l2norm=True)
        o, S = launch.forward(x, options)
        launch.backward(BackwardCall(Cotangents(o, S), (), x, options))
        launch.steps(x._replace(S=S), options)


def _name(kernel: Any, constants: Constants) -> str:
    names: list[str] = kernel.arg_names
    found: str = kernel.__name__.removesuffix("_kernel")
    if found == "scan" and (names.index("o"),) in constants:
        found = "states"
    channels = _size(names, constants, "GATES") > 1
    return f"delta {found}{', channels' if channels else ''}"


def _tile(kernel: Any, constants: Constants) -> str:
    """Returns CHUNK x SLICE."""
    names: list[str] = kernel.arg_names
    return " x ".join(str(_size(names, constants, field)) for field in ("CHUNK", "SLICE"))


def _size(names: list[str], constants: Constants, field: str) -> Any:
    return constants[names.index("sizes"), Sizes._fields.index(field)].value


DELTA = Suite(LINEAR.has_tile, _launch_all, _name, _tile)
"""A forward pass, a backward pass and steps"""
