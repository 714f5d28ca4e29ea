"""Masks of FlexAttention; other packages, with stand-ins that compute what they document."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.bench import Case, exact_outputs, peers, run_once
from transformer_kernels.bench.pictures import COLOURS
from transformer_kernels.bench.variants import VARIANTS, ours
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

END: Align = "bottom_right"


class CausalMask:
    """Stands for LowerTriangularFromBottomRightMask."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Attention by tokens, (B, S, H, D)."""
    case = Case(name="", M=q.shape[1], N=k.shape[1], mask=mask)
    x = (y.transpose(1, 2) for y in (q, k, v))
    return ours("reference")(case)(*x).transpose(1, 2)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    sides = options.get("window_size", (-1, -1))
    left, right = (None if side < 0 else side for side in sides)
    return attend(q, k, v, Mask.window(left, 0 if options.get("causal") else right, align=END))


def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any) -> Tensor:
    assert q.shape[2] == k.shape[2]
    assert attn_bias is None or isinstance(attn_bias, CausalMask)
    return attend(q, k, v, None if attn_bias is None else Mask.causal(align=END))


def parallel_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.shape[1] == k.shape[1]
    return attend(q, k, v, Mask.causal())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = SimpleNamespace(LowerTriangularFromBottomRightMask=CausalMask)
    ops = {
        "memory_efficient_attention": memory_efficient_attention,
        "fmha": SimpleNamespace(attn_bias=bias),
    }
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {"flash_attn_func": flash_attn_func},
        "xformers": {}, "xformers.ops": ops,
        "fla": {}, "fla.ops": {}, "fla.ops.attn": {"parallel_attn": parallel_attn},
    }  # fmt: skip
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


CAUSAL, CAUSAL_END = Mask.causal(), Mask.causal(align=END)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "mask", "sizes"),
    [
        ("flash_attn", None, (13, 17, 2)),
        ("flash_attn", CAUSAL, (17, 17, 2)),
        ("flash_attn", CAUSAL_END, (13, 17, 2)),
        ("flash_attn", Mask.window(5, 0, align=END), (13, 17, 4)),
        ("flash_attn", Mask.window(5, 2), (17, 17, 4)),
        ("flash_attn", Mask.window(None, 3), (17, 17, 4)),
        ("xformers", None, (13, 17, 4)),
        ("xformers", CAUSAL_END, (13, 17, 4)),
        ("fla", CAUSAL, (17, 17, 2)),
    ],
)
def test_peers_compute_the_same(name: str, mask: Mask | None, sizes: tuple[int, int, int]) -> None:
    M, N, H_kv = sizes
    case = Case(name="any", B=2, H_q=4, H_kv=H_kv, M=M, N=N, D=8, D_v=8, mask=mask)
    inputs = case.inputs()
    outputs = run_once(VARIANTS[name].attend_for(case), inputs)
    assert outputs.o.shape == (2, 4, M, 8)
    assert outputs.error(exact_outputs(case, inputs), "fwd+bwd") < 1e-5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flash_attn", {"mask": CAUSAL}, "flash_attn aligns masks with the last key"),
        ("flash_attn", {"mask": Mask.window(5, -2), "M": 17}, "windows beside the diagonal"),
        ("flash_attn", {"mask": Mask.padding(torch.tensor([3]))}, "with KeyRange masks"),
        ("flash_attn", {"mask": CAUSAL & CAUSAL, "M": 17}, "with Window, Window masks"),
        ("flash_attn", {"dropout_p": 0.5}, "not measured with bias or dropout"),
        ("xformers", {"mask": Mask.window(5, 0), "M": 17}, "without a mask and with a causal one"),
        ("xformers", {"H_kv": 2}, "not measured with grouped heads"),
        ("fla", {}, "with a causal mask and as many queries"),
        ("fla", {"mask": CAUSAL_END}, "with a causal mask and as many queries"),
    ],
)
def test_other_cases_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    case = Case(**{"name": "any", "H_q": 4, "H_kv": 4, "M": 13, "N": 17, **options})
    with pytest.raises(ValueError, match=message):
        VARIANTS[name].attend_for(case)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, object] = {"flash_attn": object()}
    spec: Callable[[str], object] = installed.get
    monkeypatch.setattr(peers, "find_spec", spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert VARIANTS["xformers"].unavailable_reason() == "xformers is not installed"
    assert VARIANTS["flash_attn"].unavailable_reason() == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert VARIANTS["flash_attn"].unavailable_reason() is None


def test_every_variant_has_a_colour_of_its_own() -> None:
    assert COLOURS.keys() == VARIANTS.keys()
    assert len({*COLOURS.values()}) == len(COLOURS)


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
    visible = peers.mask_mod(case)(b[:, None, None], torch.tensor(0), i[:, None], j).expand(B, M, N)
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
        peers.flex(Case(name="any", B=B, M=M, N=N, mask=mask))
