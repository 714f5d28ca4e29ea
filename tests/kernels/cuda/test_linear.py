"""The CUDA kernels of linear attention in the emulator, beyond the tests shared by all backends."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from building.tile_config import LINEAR_WIDTHS
from tests.gpu.sanitizer_targets import LINEAR_TARGETS
from tests.kernels.cuda.schedules import assert_no_races, assert_same_bits
from tests.support.backends import NOT_EMULATED
from tests.support.case import assert_case, named
from tests.support.linear import LINEAR_CASES, LinearCase, linear_arguments, operators_of
from tests.support.operators import operators_run_by
from transformer_kernels.linear.attention import LINEAR, CudaLinear

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WATCHED = named(LINEAR_CASES, *LINEAR_TARGETS)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", LINEAR_WIDTHS)
def test_every_tile(width: int, dtype: torch.dtype) -> None:
    """Segments of several chunks, several slices, rows of unaligned length; up to width 128 two
    segments."""
    N = 2 * width + 5 if width <= 128 else 75
    case = LinearCase(
        name="tile", B=1, H_q=2, H_kv=1, N=N, D=width - 3, D_v=width - 5, decay="token",
        state=True,
    )  # fmt: skip
    assert_case(case, dtype, "cuda")


def test_steps_keep_an_infinite_value() -> None:
    """Rows of S beyond D are not multiplied by it: their product would be NaN."""
    q, k, v = (torch.ones(1, 1, 1, 8) for _ in range(3))
    v[..., 3] = torch.inf
    state = tk.LinearState(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8))
    o = tk.linear_attention_decode(q, k, v, state, backend="cuda")
    assert o[..., 3].isinf().all()
    assert o[..., :3].isfinite().all()


def test_transposed_tensors_are_not_copied() -> None:
    x = torch.randn(2, 70, 3, 8).transpose(1, 2)
    ran = operators_run_by(lambda: tk.linear_attention(x, x, x, backend="cuda"))
    assert ran["transformer_kernels_emulated::linear_forward"] == 1
    assert not ran["aten::copy_"]


@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_bits_are_equal_under_every_thread_order(case: LinearCase) -> None:
    x = case.inputs(torch.bfloat16)
    assert_same_bits(lambda: case.run(x, "cuda"), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_kernels_have_no_races(case: LinearCase, dtype: torch.dtype) -> None:
    x = case.inputs(dtype)
    assert_no_races(lambda: case.run(x, "cuda"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", LINEAR_WIDTHS)
def test_packed_sequences_and_steps_have_no_races(width: int) -> None:
    lengths = torch.tensor([0, 40, 40, 110])
    q, k, v = (torch.randn(120, heads, width, requires_grad=True) for heads in (2, 1, 1))
    state = tk.LinearState(torch.zeros(1, 1, width, width), torch.zeros(1, 1, width))
    q1, k1, v1 = (x.detach()[None, :3].transpose(1, 2) for x in (q, k, v))

    def run() -> None:
        o = tk.linear_attention_varlen(q, k, v, lengths, backend="cuda")
        torch.autograd.grad(o.sum(), (q, k, v))
        tk.linear_attention_decode(q1, k1, v1, state, backend="cuda")

    assert_no_races(run)


def test_the_operator_checks_the_width() -> None:
    x = torch.zeros(1, 1, 3, 257)
    forward, *_ = operators_of(CudaLinear(LINEAR))
    with pytest.raises(RuntimeError, match="rows are wider than the widest tile, 256"):
        forward(*linear_arguments(x, x, x).values())


def test_explain_names_the_width() -> None:
    x = torch.zeros(1, 1, 3, 65, dtype=torch.bfloat16)
    report = tk.explain(x, x, x, operator=tk.linear_attention, backend="cuda")
    assert "csrc/cuda/linear, bfloat16, width 128)" in str(report)
