"""The backward operators check the tensors of the forward pass: kernels index them unchecked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.backends import COMPILED_BACKENDS, operators_of
from tests.support.operators import NOTHING_WANTED, operator_arguments

B, H, M, N, D, D_V = 2, 4, 70, 90, 16, 8
SAVED = ("do", "dlse", "q", "k", "v", "o", "lse", "block_mask")
WRONG: dict[str, tuple[str, Tensor]] = {
    "do-short": ("do", torch.zeros(B, H, M - 1, D_V)),
    "do-broadcast": ("do", torch.zeros(1, H, M, D_V)),
    "do-dtype": ("do", torch.zeros(B, H, M, D_V, dtype=torch.float16)),
    "o-narrow": ("o", torch.zeros(B, H, M, D_V - 1)),
    "o-3d": ("o", torch.zeros(H, M, D_V)),
    "lse-short": ("lse", torch.zeros(B, H, M - 1)),
    "lse-heads": ("lse", torch.zeros(B, 1, M)),
    "lse-dtype": ("lse", torch.zeros(B, H, M, dtype=torch.float16)),
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
    o, lse, block_mask = operators.attention_forward(**arguments)
    saved = dict(zip(SAVED, (o, lse, q, k, v, o, lse, block_mask), strict=True))
    operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)
    place, wrong = WRONG[name]
    saved[place] = wrong
    message = r"(o and do|lse and dlse|block mask) must be|expected a 4-D tensor"
    with pytest.raises(RuntimeError, match=message):
        operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)
