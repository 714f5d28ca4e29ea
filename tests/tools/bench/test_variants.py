from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from transformer_kernels.backends import CudaBackend
from transformer_kernels.bench import (
    VARIANTS,
    Case,
    Direction,
    Variant,
    exact_outputs,
    prepare_work,
    run_once,
    usable_variants,
    variants,
)
from transformer_kernels.bench.cases import Inputs
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


@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "flex"])
@pytest.mark.parametrize("option", [{"bias": torch.zeros(1, 8, 2, 2)}, {"dropout_p": 0.5}])
def test_torch_is_not_measured_with_options(option: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="not measured with bias or dropout, got case 'options'"):
        VARIANTS[name].attend_for(Case(name="options", M=2, N=2, **option))


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


@pytest.mark.parametrize("is_hopper", [False, True])
def test_a_gpu_runs_one_of_the_two_cuda_variants(
    is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(CudaBackend, "unavailable_reason", lambda self: None)
    monkeypatch.setattr(variants, "runs_hopper", lambda device: is_hopper)
    usable = {variant.name for variant in usable_variants(device=torch.device("cuda"))}
    assert ("cuda_sm80" in usable, "cuda_sm90" in usable) == (not is_hopper, is_hopper)


def test_variants_that_need_a_cuda_device_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"):
        assert VARIANTS[name].unavailable_reason() == "torch finds no CUDA device"
    assert VARIANTS["triton"].unavailable_reason() is not None


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
