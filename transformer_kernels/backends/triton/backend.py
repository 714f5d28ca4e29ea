"""The triton backend."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Problem
from ..base import FusedBackend
from . import config, operators, target


class TritonBackend(FusedBackend):
    """float16, bfloat16 and float32 on any GPU that Triton supports, or interpreted on the CPU."""

    name = "triton"
    forward_name, backward_name = operators.NAMES
    reads_packed_pages = True
    is_interpreted = target.INTERPRETED
    """True if kernels are interpreted: much slower than plain torch, so "auto" skips them."""

    def unavailable_reason(self) -> str | None:
        reason: str | None = target.reason_against(
            torch.device("cpu" if self.is_interpreted else "cuda")
        )
        return reason

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        shape = problem.shape
        unavailable = target.reason_against(shape.device)
        if unavailable is not None:
            return [unavailable]
        reasons = []
        columns, chip = max(shape.D, shape.D_v), target.chip(shape.device)
        has_keys = problem.scores.relative_keys is not None
        kernel: config.Kernel = "keys_dkdv" if has_keys else "bwd_dkdv"
        if problem.layout.kind == "cache":
            kernel = "keys_forward" if has_keys else "decode"
        if problem.layout.k_scale is not None and has_keys:
            reasons.append("relative_keys with an int8 cache: the reference backend supports them")
        if shape.dtype == torch.float64:
            reasons.append("float64: these kernels compute in float32")
        elif columns > config.WIDTHS[-1]:
            reasons.append(f"rows of {columns} elements: tiles are up to {config.WIDTHS[-1]} wide")
        elif config.tile(kernel, chip, shape.dtype.itemsize, columns) is None:
            reasons.append(
                f"rows of {columns} elements of {shape.dtype}"
                f"{' with relative_keys' if has_keys else ''}: no tile fits the "
                f"{chip.shared_kib} KiB of shared memory that {chip.name} has"
            )
        return reasons

    def kernel(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> str:
        from . import launch

        how = "interpreted by numpy" if self.is_interpreted else target.chip(q.device).name
        kernel, keys = "forward", ""
        if problem.kind == "cache":
            tile, _, _, splits = launch.decode_tiling(problem)
            kernel, keys = "decode", f", keys split in {splits}"
        else:
            tile, _ = launch.tiling("forward", problem)
        return f"backends/triton, {how}, {kernel} tile {tile.block_m} x {tile.block_n}{keys}"
