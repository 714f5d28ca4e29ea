"""The attention function: tensors that models pass, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.integrations.huggingface.tiny_models import assert_close, build, tokens
from transformer_kernels.integrations.huggingface.attention import attention_forward
from transformer_kernels.integrations.huggingface.lazy_mask import LazyMask


class Module(nn.Module):
    """A module that calls an attention function."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def heads(B: int, H: int, length: int, size: int) -> Tensor:
    return torch.randn(B, length, H, size).transpose(1, 2)


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return heads(2, 4, 5, 8), heads(2, 2, 7, 8), heads(2, 2, 7, 6)


def attend(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **more: Any) -> Tensor:
    o, weights = attention_forward(Module(), *qkv, mask, **more)
    assert weights is None
    assert o.is_contiguous()
    assert o.shape == (2, 5, 4, 6)
    return o.transpose(1, 2)


def test_causality_without_a_mask(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """The argument, else the module's attribute, else none, as in "eager"; none for one query."""
    q, k, v = qkv
    square = q, k[:, :, :5], v[:, :, :5]
    causal, full = tk.attention(*square, mask=tk.Mask.causal()), tk.attention(*square)
    for module, argument, expected in (
        (Module(), None, full),
        (Module(True), None, causal),
        (Module(False), None, full),
        (Module(False), True, causal),
        (Module(True), False, full),
    ):
        o, _ = attention_forward(module, *square, None, is_causal=argument)
        assert torch.equal(o.transpose(1, 2), expected)
    for module in (Module(), Module(True)):
        o, _ = attention_forward(module, q[:, :, :1], k, v, None)
        assert_close(o.transpose(1, 2), tk.attention(q[:, :, :1], k, v))


def test_masks(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """A mask is the whole mask: causality is not added."""
    visible = torch.rand(2, 1, 5, 7) < 0.6
    expected = tk.attention(*qkv, mask=tk.Mask.dense(visible))
    assert torch.equal(attend(qkv, visible), expected)
    added = torch.zeros(2, 1, 5, 7).masked_fill(~visible, float("-inf"))
    assert_close(attend(qkv, added), expected)
    mask = tk.Mask.padding(torch.tensor([7, 3]))
    lazy = LazyMask(mask, (2, 5, 7), torch.device("cpu"))
    assert torch.equal(attend(qkv, lazy), tk.attention(*qkv, mask=mask))


def test_options(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    sinks, bias, added = torch.randn(4), torch.randn(1, 4, 5, 7), torch.randn(2, 1, 5, 7)
    o = attend(
        qkv, added, scaling=0.3, softcap=2.0, s_aux=sinks, position_bias=bias.double(), dropout=0
    )
    expected = tk.attention(*qkv, bias=bias + added, scale=0.3, softcap=2.0, sinks=sinks)
    assert_close(o, expected)
    torch.manual_seed(5)
    dropped = attend(qkv, None, dropout=0.4)
    torch.manual_seed(5)
    assert torch.equal(dropped, tk.attention(*qkv, dropout_p=0.4))


def test_a_batch_of_one_is_broadcast(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """Learned queries, or a mask, that all rows share."""
    q, k, v = qkv
    o, _ = attention_forward(Module(False), q[:1], k, v, None)
    assert_close(o.transpose(1, 2), tk.attention(q[:1].expand_as(q), k, v))
    mask = tk.Mask.padding(torch.tensor([4]))
    lazy = LazyMask(mask, (1, 5, 7), torch.device("cpu"))
    expected = tk.attention(*qkv, mask=tk.Mask.padding(torch.tensor([4, 4])))
    assert_close(attend(qkv, lazy), expected)


def test_output_has_the_layout_of_the_queries() -> None:
    """No copy: the kernels write the layout that the next projection reads."""
    q, k, v = (heads(2, 4, 5, 8) for _ in range(3))
    o, _ = attention_forward(Module(True), q, k, v, None)
    assert o.is_contiguous()
    assert tk.attention(q, k, v, mask=tk.Mask.causal()).transpose(1, 2).is_contiguous()


def test_sinks_of_each_query(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """The same as those of each head, where all queries have the same; and their gradient."""
    sinks = torch.randn(4, requires_grad=True)
    o = attend(qkv, None, sinks=sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1))
    (found,) = torch.autograd.grad(o.sin().sum(), sinks)
    expected = attend(qkv, None, s_aux=sinks)
    assert_close(o, expected)
    assert_close(found, torch.autograd.grad(expected.sin().sum(), sinks)[0])
    hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    assert not attend(qkv, hidden, sinks=sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)).any()


def test_chosen_keys(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of the visible keys, those that an indexer chose, in any order."""
    indices = torch.stack([torch.randperm(7)[:3] for _ in range(10)]).view(2, 5, 3)
    visible = torch.zeros(2, 5, 7, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    padding = tk.Mask.padding(torch.tensor([7, 4]))
    lazy = LazyMask(padding, (2, 5, 7), torch.device("cpu"))
    expected = tk.attention(*qkv, mask=padding & tk.Mask.dense(visible))
    assert torch.equal(attend(qkv, lazy, indices=indices.int()), expected)


def test_chosen_blocks(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """Blocks of 3 keys, the last of them not full, in two groups of heads; -1 is none."""
    module: Any = Module()
    module.indexer = SimpleNamespace(block_size=3)
    blocks = torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1], [0, 1]]).expand(2, 2, 5, 2).clone()
    blocks[1, 1] = 2
    blocks_of_keys = torch.arange(7) // 3
    visible = (blocks[..., None] == blocks_of_keys).any(-2).repeat_interleave(2, dim=1)
    expected = tk.attention(*qkv, mask=tk.Mask.dense(visible))
    o, _ = attention_forward(module, *qkv, None, block_indices=blocks)
    assert torch.equal(o.transpose(1, 2), expected)


class Looking(nn.Module):
    """A module with an argument that only its own kernels know."""

    def forward(self, qkv: tuple[Tensor, Tensor, Tensor], **arguments: Any) -> Tensor:
        o, _ = attention_forward(self, *qkv, None, lookahead=arguments.pop("look"), **arguments)
        return o


@pytest.mark.parametrize("is_compiled", [False, True])
def test_arguments_that_are_not_known(
    qkv: tuple[Tensor, Tensor, Tensor], is_compiled: bool
) -> None:
    """Those that the module itself passes are refused; those of the model's call have no effect."""
    module: Any = Looking()
    torch.compiler.reset()
    run = torch.compile(module, backend="aot_eager") if is_compiled else module
    expected = run(qkv, look=None)
    assert torch.equal(run(qkv, look=None, logits_to_keep=4, sliding_window=3), expected)
    with pytest.raises(ValueError, match="Looking passes lookahead=3 to its attention"):
        run(qkv, look=3)
    with pytest.raises(ValueError, match="Looking passes cache="):
        run(qkv, look=None, cache="pages")


def test_errors(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    wrong: dict[str, tuple[Tensor | None, dict[str, Any]]] = {
        'output_attentions=True needs attn_implementation="eager"': (
            None, {"output_attentions": True}),
        "the dense mask must broadcast": (torch.ones(2, 1, 5, 6, dtype=torch.bool), {}),
        "attention_mask must be given for 5 queries and 7 keys": (None, {"is_causal": True}),
        r"the dense mask must broadcast to .*": (
            LazyMask(tk.Mask(), (2, 5, 6), torch.device("cpu")), {}),
    }  # fmt: skip
    for message, (mask, options) in wrong.items():
        with pytest.raises(ValueError, match=message):
            attend(qkv, mask, **options)


@pytest.mark.exhaustive
def test_output_attentions_of_a_model() -> None:
    with pytest.raises(ValueError, match="eager"):
        build("bert")(tokens(), output_attentions=True)
