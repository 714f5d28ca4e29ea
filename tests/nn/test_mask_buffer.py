"""`nn.MaskBuffer`: a mask that follows its module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from transformer_kernels.nn import MaskBuffer

T = 7
IDS, LENGTHS = torch.arange(T)[None] // 3, torch.tensor([5])
EVERY_KIND = (
    tk.Mask.window(4, 1, align="bottom_right")
    & tk.Mask.padding(LENGTHS)
    & tk.Mask.key_range(LENGTHS - 4, LENGTHS)
    & tk.Mask.segments(IDS)
    & tk.Mask.segments(IDS + torch.arange(T), IDS, equal=False)
    & tk.Mask.positions(IDS, IDS + 1, 2, 3)
    & tk.Mask.dense(torch.rand(T, T) > 0.3)
    & tk.Mask.block_sparse(torch.ones(4, 4, dtype=torch.bool), 2)
)
TENSORS = 11


class Attention(nn.Module):
    def __init__(self, mask: tk.Mask, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.mask = MaskBuffer(mask, **options)

    def forward(self, q: Tensor) -> Tensor:
        return tk.attention(q, q, q, mask=self.mask())


def test_it_holds_every_kind_of_mask() -> None:
    mask = MaskBuffer(EVERY_KIND)()
    assert [type(one) for one in mask.constraints] == [type(one) for one in EVERY_KIND.constraints]
    assert len(mask.tensors()) == TENSORS
    assert torch.equal(mask.materialize(1, 2, T, T), EVERY_KIND.materialize(1, 2, T, T))
    assert MaskBuffer(tk.Mask())().constraints == ()


def test_it_moves_with_the_module() -> None:
    module = Attention(EVERY_KIND).half()
    assert {x.dtype for _, x in module.mask().tensors()} == {torch.int64, torch.bool}
    assert copy.deepcopy(module).to("meta").mask().device == torch.device("meta")
    assert {x.device.type for _, x in module.to("meta").mask().tensors()} == {"meta"}
    empty = module.to_empty(device="cpu").mask()
    assert [(name, x.shape, x.dtype) for name, x in empty.tensors()] == [
        (name, x.shape, x.dtype) for name, x in EVERY_KIND.tensors()
    ]


def test_it_is_in_the_state_dict_on_request() -> None:
    assert (
        Attention(EVERY_KIND).state_dict().keys()
        == nn.ModuleDict({"proj": nn.Linear(4, 4)}).state_dict().keys()
    )
    saved = Attention(tk.Mask.causal() & tk.Mask.padding(LENGTHS), persistent=True).state_dict()
    other = Attention(tk.Mask.causal() & tk.Mask.padding(LENGTHS - 2), persistent=True)
    other.load_state_dict(saved)
    assert torch.equal(saved["mask.end_1"], LENGTHS)
    assert torch.equal(other.mask().tensors()[0][1], LENGTHS)


def test_compiled_code() -> None:
    module, q = Attention(EVERY_KIND), torch.randn(1, 2, T, 4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), tk.attention(q, q, q, mask=EVERY_KIND))


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="mask must be a Mask, got None"):
        MaskBuffer(None)  # type: ignore[arg-type]
