from __future__ import annotations

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.bench import Case
from transformer_kernels.bench.flex import flex, mask_mod
from transformer_kernels.masks.mask import Mask

B, M, N = 2, 9, 12

MASKS = {
    "causal": Mask.causal(),
    "bottom-right": Mask.causal(align="bottom_right"),
    "window": Mask.window(3, 1),
    "behind": Mask.window(None, -2),
    "ahead": Mask.window(2, None),
    "padding": Mask.padding(torch.tensor([5, 12])),
    "range": Mask.key_range(torch.tensor([2, 0]), torch.tensor([5, 7])),
    "segments": Mask.segments(
        torch.arange(M).expand(B, -1) // 4, torch.arange(N).expand(B, -1) // 5
    ),
    "blocks": Mask.block_sparse(torch.rand(3, 4) < 0.5, 3),
    "both": Mask.causal() & Mask.padding(torch.tensor([5, 12])),
}


@each("mask", MASKS.values(), ids=MASKS)
def test_a_mask_mod_equals_the_mask(mask: Mask) -> None:
    case = Case(name="any", B=B, M=M, N=N, mask=mask)
    b, i, j = (torch.arange(size) for size in (B, M, N))
    visible = mask_mod(case)(b[:, None, None], torch.tensor(0), i[:, None], j).expand(B, M, N)
    assert torch.equal(visible, mask.materialize(B, 1, M, N)[:, 0])


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (Mask.dense(torch.ones(M, N, dtype=torch.bool)), "Dense masks"),
        (Mask.block_sparse(torch.ones(8, 3, 4, dtype=torch.bool), 3), "BlockSparse masks"),
        (Mask.window(), "a window that hides nothing"),
    ],
    ids=["dense", "layout-by-head", "unbounded"],
)
def test_an_unsupported_mask_is_named_in_the_error(mask: Mask, kind: str) -> None:
    with pytest.raises(ValueError, match=f"FlexAttention is not measured with {kind}"):
        flex(Case(name="any", B=B, M=M, N=N, mask=mask))
