"""Example rows and comparisons, with given times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from transformer_kernels.bench import Case, Direction, Provenance, Row, Timing, make_row
from transformer_kernels.bench.comparison.calls import Call, Shape
from transformer_kernels.bench.comparison.run import CallResult, Comparison
from transformer_kernels.bench.contenders import Measured
from transformer_kernels.bench.limits import Limits
from transformer_kernels.bench.steadiness import Disturbed, Steady
from transformer_kernels.masks.mask import Mask

PROVENANCE = Provenance("2026-01-02T03:04:05Z", "abc1234", "xeon-amx", "2.13.0+cpu", "", "", 2)
CASE = Case(name="causal", M=4, N=4, mask=Mask.causal(), mask_name="causal", dtype=torch.float16)


def row(*, case: Case = CASE, peak_bytes: int | None = 3 * 2**20) -> Row:
    return make_row(
        PROVENANCE,
        suite="attention",
        case=case,
        direction="fwd",
        variant="cpu",
        timing=Timing(2.0, 1.5, 2.5, 7),
        peak_bytes=peak_bytes,
        error=1.25e-7,
    )


CALL = Call(
    name="llama, prefill", shape=Shape.parse("1,8,8,4,4,64"), mask="causal", dtype=torch.float16
)
DISTURBED = replace(CALL, name="disturbed", mask="window:2")


def measured(
    variant: str, milliseconds: float, direction: Direction = "fwd", rounds: int = 9
) -> Measured:
    """Rounds around a median, 1% apart."""
    laps = tuple(milliseconds * (1 + 0.01 * (n - rounds // 2)) for n in range(rounds))
    one = replace(
        row(), suite="bench", variant=variant, direction=direction, median_ms=milliseconds,
        p20_ms=0.9 * milliseconds, p80_ms=1.2 * milliseconds, tflops=round(1.0 / milliseconds, 4),
        gbytes_s=1.0,
    )  # fmt: skip
    return Measured(one, laps)


def comparison(
    times: Mapping[str, float], *, skipped: Mapping[str, str] | None = None
) -> Comparison:
    """Forward and both passes of a call in the given milliseconds; another one was disturbed."""
    directions: dict[Direction, float] = {"fwd": 1.0, "fwd+bwd": 3.0}
    found = [
        measured(variant, ms * factor, direction)
        for direction, factor in directions.items()
        for variant, ms in times.items()
    ]
    result = CallResult(found, dict(skipped or {}), {}, 2)
    return Comparison(
        PROVENANCE,
        Steady([(CALL, result)], [Disturbed(DISTURBED, CallResult([], {}, {}, 4), 0.125)]),
        {"float16": Limits(tflops=2.0, gbytes_s=100.0)},
    )
