"""Variants, masks of FlexAttention, and other packages: stand-ins compute what they document."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.tiers import each
from transformer_kernels.backends import CudaBackend
from transformer_kernels.bench import (
    VARIANTS,
    Case,
    Direction,
    Variant,
    exact_outputs,
    peers,
    prepare_work,
    run_once,
    usable_variants,
    variants,
)
from transformer_kernels.bench.cases import Inputs
from transformer_kernels.bench.pictures import COLOURS
from transformer_kernels.bench.variants import ours
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

MASKS = {
    "full": None,
    "causal": Mask.causal(),
    "window": Mask.window(5, 1),
    "padding": Mask.padding(torch.tensor([11, 3])),
}
ON_CPUS = [variant for variant in VARIANTS.values() if "cpu" in variant.devices]
"""tests/gpu/test_bench.py has the others."""


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("variant", ON_CPUS, ids=lambda variant: variant.name)
def test_every_variant_computes_the_same(variant: Variant, mask: Mask | None) -> None:
    case = Case(name="any", B=2, H_q=4, H_kv=2, M=13, N=17, D=8, D_v=6, mask=mask)
    inputs = case.inputs()
    outputs = run_once(variant.attend_for(case), inputs)
    assert outputs.error(exact_outputs(case, inputs), "fwd+bwd") < 1e-5


@pytest.mark.parametrize("name", ["naive", "cpu"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_naive_and_ours_apply_all_options(name: str, dropout_p: float) -> None:
    """Ignoring any option would give an error of about 10%."""
    bias = torch.randn(2, 4, 13, 17, requires_grad=True)
    case = Case(
        name="options", B=2, H_q=4, H_kv=2, M=13, N=17, D=8, D_v=6,
        mask=Mask.window(5, 1), bias=bias, dropout_p=dropout_p,
    )  # fmt: skip
    inputs = case.inputs()
    outputs = run_once(VARIANTS[name].attend_for(case), inputs, case.learned)
    assert outputs.dbias is not None
    assert outputs.error(exact_outputs(case, inputs), "fwd+bwd") < 1e-5


def test_a_variant_is_usable_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = [variant.name for variant in usable_variants()]
    assert on_cpu == ["naive", "sdpa", "cpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    # A CPU build of torch cannot query the driver.
    monkeypatch.setattr(CudaBackend, "unavailable_reason", lambda self: "there is no driver")
    assert [variant.name for variant in usable_variants()] == on_cpu
    on_cuda = [variant.name for variant in usable_variants(device=torch.device("cuda"))]
    assert on_cuda[:6] == ["naive", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"]
    assert "cpu" not in on_cuda


def test_a_gpu_runs_one_of_the_two_cuda_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(CudaBackend, "unavailable_reason", lambda self: None)
    for is_hopper in (False, True):
        monkeypatch.setattr(variants, "runs_hopper", lambda _, is_hopper=is_hopper: is_hopper)
        usable = {variant.name for variant in usable_variants(device=torch.device("cuda"))}
        assert ("cuda_sm80" in usable, "cuda_sm90" in usable) == (not is_hopper, is_hopper)


def test_an_unsupported_sdpa_kernel_does_not_fall_back() -> None:
    """SDPA has no efficient kernel on the CPU."""
    case = Case(name="full", M=2, N=2)
    with pytest.raises(RuntimeError, match="No viable backend"):
        VARIANTS["sdpa_efficient"].attend_for(case)(*case.inputs()[:3])


def test_an_unknown_variant_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"variants of naive, sdpa, .*triton, got 'flash'"):
        usable_variants(["flash"])


class Recorded:
    """Attention that records its calls."""

    def __init__(self) -> None:
        self.grad_modes: list[bool] = []
        self.backward_calls = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.grad_modes.append(torch.is_grad_enabled())
        o = q + k + v
        if o.requires_grad:
            o.register_hook(self._count)
        return o

    def _count(self, _grad: torch.Tensor) -> None:
        self.backward_calls += 1


@pytest.mark.parametrize(
    ("direction", "before", "after"),
    [("fwd", ([], 0), ([False], 0)), ("bwd", ([True], 0), ([True], 1)),
     ("fwd+bwd", ([], 0), ([True], 1))],
)  # fmt: skip
def test_a_workload_runs_the_passes_of_its_direction(
    direction: Direction, before: tuple[list[bool], int], after: tuple[list[bool], int]
) -> None:
    attend = Recorded()
    inputs = Inputs(*(torch.ones(1, 1, 2, 2) for _ in range(4)))
    prepare = prepare_work(attend, inputs, direction)
    workload = prepare()
    assert (attend.grad_modes, attend.backward_calls) == before
    workload()
    assert (attend.grad_modes, attend.backward_calls) == after
    prepare()()  # a new graph for each run
    assert attend.backward_calls == 2 * after[1]


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_learned_tensors_get_a_gradient(direction: Direction) -> None:
    bias = torch.zeros(1, 1, 2, 2, requires_grad=True)
    inputs = Inputs(*(torch.ones(1, 1, 2, 2) for _ in range(4)))
    workload = prepare_work(lambda q, k, v: q + k + v + 3.0 * bias, inputs, direction, (bias,))()
    *_, dbias = cast("tuple[torch.Tensor, ...]", workload())
    assert torch.equal(dbias, torch.full_like(bias, 3.0))


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
        *(
            (name, option, "not measured with bias or dropout, got case 'any'")
            for name in ("sdpa", "sdpa_flash", "flex", "flash_attn")
            for option in ({"bias": torch.zeros(1, 4, 13, 17)}, {"dropout_p": 0.5})
        ),
        ("flex", {"mask": Mask.dense(torch.ones(13, 17) > 0)}, "not measured with Dense masks"),
        ("flex", {"mask": Mask.block_sparse(torch.ones(4, 5, 6) > 0, 3)}, "with BlockSparse masks"),
        ("flex", {"mask": Mask.window()}, "FlexAttention is .* a window that hides nothing"),
        ("flash_attn", {"mask": CAUSAL}, "flash_attn aligns masks with the last key"),
        ("flash_attn", {"mask": Mask.window(5, -2), "M": 17}, "windows beside the diagonal"),
        ("flash_attn", {"mask": Mask.padding(torch.tensor([3]))}, "with KeyRange masks"),
        ("flash_attn", {"mask": CAUSAL & CAUSAL, "M": 17}, "with Window, Window masks"),
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


def test_a_variant_that_cannot_run_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, object] = {"flash_attn": object()}
    spec: Callable[[str], object] = installed.get
    monkeypatch.setattr(peers, "find_spec", spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert VARIANTS["xformers"].unavailable_reason() == "xformers is not installed"
    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "flash_attn"):
        assert VARIANTS[name].unavailable_reason() == "torch finds no CUDA device"
    assert VARIANTS["triton"].unavailable_reason() is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert VARIANTS["flash_attn"].unavailable_reason() is None


def test_every_variant_has_a_colour_of_its_own() -> None:
    assert COLOURS.keys() == VARIANTS.keys()
    assert len({*COLOURS.values()}) == len(COLOURS)


B, M, N = 2, 9, 12

FLEX_MASKS = {
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


@each("mask", FLEX_MASKS.values(), ids=FLEX_MASKS)
def test_a_mask_mod_equals_the_mask(mask: Mask) -> None:
    case = Case(name="any", B=B, M=M, N=N, mask=mask)
    b, i, j = (torch.arange(size) for size in (B, M, N))
    visible = peers.mask_mod(case)(b[:, None, None], torch.tensor(0), i[:, None], j).expand(B, M, N)
    assert torch.equal(visible, mask.materialize(B, 1, M, N)[:, 0])
