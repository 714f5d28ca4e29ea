"""The CUDA kernels of linear attention in the emulator, beyond the tests shared by all backends."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from building.emulated import Emulation
from building.tile_config import LINEAR_WIDTHS
from tests.gpu.sanitizer_targets import LINEAR_TARGETS
from tests.support import emulator
from tests.support.emulated import NOT_EMULATED
from tests.support.linear import (
    LinearCase,
    assert_linear_case,
    assert_steps_continue,
    linear_by_backend,
    linear_case,
    linear_inputs,
)
from tests.support.operators import operators_run_by
from tests.support.poison import poisoned_memory
from transformer_kernels.linear.cuda import CudaLinear

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

RACES = Emulation(races=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEGMENTED = [
    linear_case(name)
    for name in ("segments", "segments-gqa", "segments-all", "gqa", "range", "all-lengths")
]
WATCHED = [linear_case(name) for name in LINEAR_TARGETS]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ctas", [1, 12])
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments_of_several_chunks(case: LinearCase, ctas: int) -> None:
    """By default segments of short sequences have one chunk each."""
    with emulator.aimed_ctas(ctas):
        assert_linear_case(case, torch.float32, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", LINEAR_WIDTHS)
def test_every_tile(width: int, dtype: torch.dtype) -> None:
    """Several segments of several chunks, several slices, rows of unaligned length."""
    case = LinearCase(
        "tile", B=1, H_q=2, H_kv=1, N=140, D=width - 3, D_v=width - 5, decay="token", state=True
    )
    with emulator.aimed_ctas(2):
        assert_linear_case(case, dtype, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("D", "D_v"), [(7, 9), (90, 150), (250, 20)])
def test_steps_of_every_width(D: int, D_v: int) -> None:
    """The columns of S are computed 64 at a time, each from the same z."""
    assert_steps_continue(D, D_v, "cuda")


def test_steps_keep_an_infinite_value() -> None:
    """Rows of S beyond D are not multiplied by it: their product would be NaN."""
    q, k, v = (torch.ones(1, 1, 1, 8) for _ in range(3))
    v[..., 3] = torch.inf
    state = tk.LinearState(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8))
    o = tk.linear_attention_decode(q, k, v, state, backend="cuda")
    assert o[..., 3].isinf().all()
    assert o[..., :3].isfinite().all()


def test_bits_do_not_depend_on_the_position_in_the_batch_or_the_strides() -> None:
    q, k, v = (torch.randn(1, 3, 100, 8).repeat(3, 1, 1, 1) for _ in range(3))
    first, end = tk.linear_attention(q, k, v, return_state=True, backend="cuda")
    for x in (first, *end):
        assert torch.equal(x, x[:1].expand_as(x))
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(tk.linear_attention(*strided, backend="cuda"), first)
    columns = (x.mT.contiguous().mT for x in (q, k, v))
    assert torch.equal(tk.linear_attention(*columns, backend="cuda"), first)


def test_transposed_tensors_are_not_copied() -> None:
    x = torch.randn(2, 70, 3, 8).transpose(1, 2)
    ran = operators_run_by(lambda: tk.linear_attention(x, x, x, backend="cuda"))
    assert ran["transformer_kernels_emulated::linear_forward"] == 1
    assert not ran["aten::copy_"]


def test_offsets_beyond_the_rows_are_clamped() -> None:
    """Values of cu_seqlens on a device are not checked: the kernels stay within the rows."""
    forward, *_ = CudaLinear().operators(torch.device("cpu"))
    x = [torch.randn(1, 2, 150, 8) for _ in range(3)]

    def run(*offsets: int) -> list[torch.Tensor]:
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        results = forward(*x, None, None, None, cu_seqlens, None, None, 0, True, True, 1e-6)
        return list(results)

    with poisoned_memory():
        whole = run(0, 70, 150)
        for offsets in ((0, 70, 1000), (-5, 70, 150), (-5, 70, 2**31 - 1)):
            for got, expected in zip(run(*offsets), whole, strict=True):
                assert torch.equal(got, expected)
        assert run(0, 90, 60)[0][:, :, :90].isfinite().all()  # offsets that decrease
        assert not run(100, 150)[0][:, :, :100].any()  # offsets that begin late


@pytest.mark.parametrize("aimed", [0, 6])
@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_bits_are_equal_under_every_thread_order(case: LinearCase, aimed: int) -> None:
    x, runs = linear_inputs(case, torch.bfloat16), []
    for seed in range(3):
        with emulator.schedule(seed), emulator.aimed_ctas(aimed):
            runs.append(linear_by_backend(case, x, "cuda"))
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("aimed", [0, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_kernels_have_no_races(case: LinearCase, dtype: torch.dtype, aimed: int) -> None:
    """The emulator also raises an error for accesses outside of the tensors of the call."""
    x = linear_inputs(case, dtype)
    for seed in range(2):
        with emulator.emulation(RACES), emulator.schedule(seed), emulator.aimed_ctas(aimed):
            linear_by_backend(case, x, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", LINEAR_WIDTHS)
def test_packed_sequences_and_steps_have_no_races(width: int) -> None:
    lengths = torch.tensor([0, 40, 40, 110])
    q, k, v = (torch.randn(120, heads, width, requires_grad=True) for heads in (2, 1, 1))
    state = tk.LinearState(torch.zeros(1, 1, width, width), torch.zeros(1, 1, width))
    q1, k1, v1 = (x.detach()[None, :3].transpose(1, 2) for x in (q, k, v))
    for seed in range(2):
        with emulator.emulation(RACES), emulator.schedule(seed):
            o = tk.linear_attention_varlen(q, k, v, lengths, backend="cuda")
            torch.autograd.grad(o.sum(), (q, k, v))
            tk.linear_attention_decode(q1, k1, v1, state, backend="cuda")


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (257, torch.float32, "rows of 257 elements: tiles are up to 256 wide"),
        (8, torch.float64, "float64: these kernels compute in float32"),
    ],
)
def test_limits(width: int, dtype: torch.dtype, reason: str) -> None:
    x = torch.zeros(1, 1, 3, width, dtype=dtype)
    with pytest.raises(ValueError, match=reason):
        tk.linear_attention(x, x, x, backend="cuda")
    report = tk.explain(x, x, x, operator=tk.linear_attention)
    assert report.chosen == "cpu"
    assert reason in str(report)


def test_the_operator_checks_the_width() -> None:
    x = torch.zeros(1, 1, 3, 257)
    forward, *_ = CudaLinear().operators(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="rows are wider than the widest tile, 256"):
        forward(x, x, x, None, None, None, None, None, None, 0, True, True, 1e-6)


def test_explain_names_the_width() -> None:
    x = torch.zeros(1, 1, 3, 65, dtype=torch.bfloat16)
    report = tk.explain(x, x, x, operator=tk.linear_attention, backend="cuda")
    assert "csrc/cuda/linear, bfloat16, width 128, emulated" in str(report)
