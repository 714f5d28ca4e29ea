"""The backward operators check the tensors of the forward pass: kernels index them unchecked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import NOTHING_WANTED, operator_arguments

B, H, M, N, D, D_V = 2, 4, 70, 90, 16, 8
SAVED = ("do", "dlse", "q", "k", "v", "o", "row_stats", "block_mask")
WRONG: dict[str, tuple[str, Tensor]] = {
    "do-short": ("do", torch.zeros(B, H, M - 1, D_V)),
    "do-broadcast": ("do", torch.zeros(1, H, M, D_V)),
    "do-dtype": ("do", torch.zeros(B, H, M, D_V, dtype=torch.float16)),
    "o-narrow": ("o", torch.zeros(B, H, M, D_V - 1)),
    "o-3d": ("o", torch.zeros(H, M, D_V)),
    "row-stats-short": ("row_stats", torch.zeros(2, B, H, M - 1)),
    "row-stats-heads": ("row_stats", torch.zeros(2, B, 1, M)),
    "row-stats-dtype": ("row_stats", torch.zeros(2, B, H, M, dtype=torch.float16)),
    "row-stats-lse-alone": ("row_stats", torch.zeros(1, B, H, M)),
    "row-stats-3d": ("row_stats", torch.zeros(B, H, M)),
    "dlse-short": ("dlse", torch.zeros(B, H, M - 1)),
    "dlse-scalar": ("dlse", torch.zeros(())),
    "block-mask-rows": ("block_mask", torch.zeros(B, H, 1, 2, dtype=torch.uint8)),
    "block-mask-columns": ("block_mask", torch.zeros(B, H, 2, 1, dtype=torch.uint8)),
    "block-mask-batch": ("block_mask", torch.zeros(3, H, 2, 2, dtype=torch.uint8)),
    "block-mask-strided": ("block_mask", torch.zeros(B, H, 2, 4, dtype=torch.uint8)[..., ::2]),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_wrong_tensors_are_refused(name: str, backend: str) -> None:
    operators = operators_of(backend)
    q, k, v = torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D_V)
    arguments = operator_arguments(q, k, v, dense=torch.rand(B, H, M, N) < 0.5)
    _, _, _, *rest = arguments.values()
    o, row_stats, block_mask = operators.attention_forward(**arguments)
    saved = dict(zip(SAVED, (o, row_stats[0], q, k, v, o, row_stats, block_mask), strict=True))
    operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)
    place, wrong = WRONG[name]
    saved[place] = wrong
    message = r"(o and do|row_stats|dlse|block mask) must be|expected a 4-D tensor"
    with pytest.raises(RuntimeError, match=message):
        operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)
