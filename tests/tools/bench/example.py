"""An example row for tests."""

from __future__ import annotations

import torch

from transformer_kernels.bench import Case, Provenance, Row, Timing, make_row
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
