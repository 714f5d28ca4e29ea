"""The Hopper kernels (csrc/cuda/sm90) in the emulator: supported problems, results, data races."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.extension import ROOT
from tests.gpu import sanitizer_targets
from tests.kernels.cuda.hopper_cases import HOPPER_CASES, HOPPER_VARLEN
from tests.kernels.cuda.schedules import RACES, SMALL, assert_no_races, assert_same_bits
from tests.support import emulator
from tests.support.backends import NOT_EMULATED, operators_of
from tests.support.case import AnyCase, assert_case, named
from tests.support.cases import CASES, HIDDEN_CASES, Case, assert_hidden_nan_changes_nothing
from tests.support.finite_masks import assert_exact, make_call
from tests.support.operators import assert_offsets_are_clamped
from tests.support.oracle import plain_attention
from tests.support.tiers import crossed, each
from tests.support.varlen_cases import VARLEN_CASES, VarlenCase
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.functional.explain import explain

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

SUPPORTED = [case for case in (*CASES, *HOPPER_CASES) if max(case.D, case.D_v) <= 256]
FLOAT16_CASES = [
    case
    for case in SUPPORTED
    if case.name.startswith(("width-", "wide-", "causal", "padding", "many-tiles", "persistent-1"))
    or case.name
    in (
        *sanitizer_targets.ATTENTION_TARGETS,
        "all-masks",
        "steep",
        "scale-negative",
        "softcap-bias",
        "dropout",
    )
]
"""Cases that also run in float16."""
SAMPLED = named(CASES, *sanitizer_targets.ATTENTION_TARGETS)
SAMPLED_HOPPER = named(
    HOPPER_CASES,
    *("persistent", "persistent-128", "range-nan", "documents-nan", "wide-keys-192"),
    *("queries-256", "persistent-causal", "shared-keys", "shared-keys-192", "shared-keys-256"),
)
RACE_CASES = named(
    HOPPER_CASES,
    *("many-tiles", "many-tiles-128", "many-short-tiles", "lengths-nan", "queries-256"),
    *("dropout-queries", "persistent-causal", "shared-keys", "shared-keys-128"),
)
FINITE_MASKS = ("rows-1e9", "causal", "dropout", "alibi", "products")
HALF = ((torch.float16,), (torch.bfloat16,))
FORWARD_KERNEL = "(sm90::forward_kernel<Element, kWidth, kVWidth>)"


@pytest.fixture(autouse=True)
def _hopper() -> Iterator[None]:
    with emulator.chip(90):
        yield


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", crossed(SUPPORTED))
def test_case(case: Case) -> None:
    assert_case(case, torch.bfloat16, "cuda")


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", HIDDEN_CASES, ids=str)
def test_hidden_nan_changes_nothing(case: Case) -> None:
    assert_hidden_nan_changes_nothing(case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FLOAT16_CASES, ids=str)
def test_case_in_float16(case: Case) -> None:
    assert_case(case, torch.float16, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "dtype"), crossed(FINITE_MASKS, HALF))
def test_finite_masks(case: str, dtype: torch.dtype) -> None:
    assert_exact(make_call(case, dtype), "cuda")


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", crossed([*VARLEN_CASES, *HOPPER_VARLEN]))
def test_varlen(case: VarlenCase) -> None:
    assert_case(case, torch.bfloat16, "cuda")


def runs_sm90(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if attention launches the sm90 forward kernel. Asserts that `explain` agrees."""
    with torch.no_grad():
        tk.attention(q, k, v, backend="cuda")
    launched = emulator.latest_launch()
    assert "forward_kernel" in launched or "decode" in launched
    kernel = explain(q, k, v, backend="cuda").kernel
    assert kernel is not None
    forward, *_ = kernel.split(";")[0].split(" forward")
    assert ("decode" in forward) == ("decode" in launched), kernel
    assert ("sm90" in forward) == (launched == FORWARD_KERNEL), kernel
    return launched == FORWARD_KERNEL


def test_explain_names_the_kernel_that_runs() -> None:
    """The sm90 kernels require 16-byte aligned, non-overlapping rows."""
    for case in CASES:
        if max(case.D, case.D_v) > 256 or 0 in (case.B, case.M):
            continue  # nothing is launched
        x = case.inputs(torch.bfloat16)
        multiples_of_8 = case.D % 8 == case.D_v % 8 == 0
        unsupported = case.layout in ("unaligned", "expanded") or case.N == 0
        unsupported |= "decode" in str(explain(x.q, x.k, x.v, backend="cuda").kernel)
        assert runs_sm90(x.q, x.k, x.v) == (multiples_of_8 and not unsupported), case.name


@each("case", SAMPLED, ids=str)
def test_float32_runs_the_sm80_kernel(case: Case) -> None:
    x = case.inputs(torch.float32)
    assert not runs_sm90(x.q, x.k, x.v)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("query", [5, 6])
def test_nan_in_a_query_reaches_the_gradients_of_all_keys(query: int, D: int) -> None:
    """Also through weights that are computed by a polynomial: some of queries 0 to 5 of 8."""
    q, k, v, d_o = (torch.randn(1, 1, 128, D, dtype=torch.bfloat16) for _ in range(4))
    q[:, :, query, 0] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = tk.attention(*inputs, backend="cuda")
    dq, dk, dv = torch.autograd.grad(o, inputs, d_o)
    rows = torch.arange(128) == query
    for x, expected in ((o, rows), (dq, rows), (dk, rows | True), (dv, rows | True)):
        assert torch.equal(x[0, 0].isnan().all(dim=1), expected)
        assert torch.equal(x[0, 0].isnan().any(dim=1), expected)


def assert_right(q: Tensor, k: Tensor, v: Tensor) -> None:
    exact = tk.attention(q.double(), k.double(), v.double(), backend="reference")
    plain, _ = plain_attention(q, k, v)
    assert_within_rule("o", tk.attention(q, k, v, backend="cuda"), exact, plain)


def with_nan_rows(x: Tensor, rows: int) -> Tensor:
    """x, followed by rows of NaN."""
    return torch.cat([x, x.new_full((*x.shape[:2], rows, x.shape[3]), torch.nan)], dim=2)


LAYOUTS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "contiguous": (True, lambda x: x),
    "(B, M, H, D) in memory": (True, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "(M, H, B, D) in memory": (True, lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
    "columns of wider rows": (True, lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]]),
    "rows of a longer tensor": (True, lambda x: with_nan_rows(x, 3)[:, :, : x.shape[2]]),
    "every second element": (True, lambda x: x.repeat_interleave(2, dim=3)[..., ::2]),
    "every second row": (True, lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2]),
    "heads expanded from one": (False, lambda x: x[:, :1].expand(x.shape)),
    "batch expanded from one": (False, lambda x: x[:1].expand(x.shape)),
    "rows expanded from one": (False, lambda x: x[:, :, :1].expand(x.shape)),
    "row stride of 60 bytes": (False, lambda x: x[..., :30].contiguous()),
    "row stride of 76 bytes": (
        False,
        lambda x: torch.cat([x, x], dim=3)[..., :38].contiguous()[..., :32],
    ),
    "data misaligned by 8 bytes": (False, lambda x: torch.cat([x, x], dim=3)[..., 4:36]),
}


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_layouts(name: str, which: str) -> None:
    """Layouts of one tensor. Those that TMA cannot address run the sm80 kernel."""
    is_supported, lay_out = LAYOUTS[name]
    x = {name: torch.randn(2, 2, 67, 32).to(torch.bfloat16) for name in "qkv"}
    width = x[which].shape[3]
    x[which] = lay_out(x[which])
    if (narrow := x[which].shape[3]) != width and which != "v":
        x |= {other: x[other][..., :narrow] for other in "qk"}
    assert runs_sm90(**x) == is_supported
    assert_right(x["q"], x["k"], x["v"])


def test_unaligned_width_in_aligned_rows() -> None:
    x = torch.randn(2, 2, 67, 32).to(torch.bfloat16)
    x[..., 30:] = torch.nan
    q, v = x[..., :30], x[..., :24]
    assert runs_sm90(q, q, v)
    assert not runs_sm90(q, q, q)  # the rows of o have 60 bytes
    assert_right(q, q, v)


@each(
    ("D", "D_v", "widths"),
    [
        (8, 8, "64/64"),
        (64, 64, "64/64"),
        (64, 72, "128/128"),
        (128, 8, "128/128"),
        (136, 128, "192/128"),
        (192, 128, "192/128"),
        (192, 136, "256/256"),
        (200, 8, "256/256"),
        (256, 256, "256/256"),
        (1, 1, None),
        (20, 32, None),
        (32, 20, None),
        (250, 250, None),
    ],
)
def test_widths(D: int, D_v: int, widths: str | None) -> None:
    q = torch.randn(1, 2, 3, D).to(torch.float16)
    v = torch.randn(1, 2, 3, D_v).to(torch.float16)
    assert runs_sm90(q, q, v) == (widths is not None)
    kernel = explain(q, q, v, backend="cuda").kernel
    if widths is not None:
        assert kernel == f"csrc/cuda/sm90, float16, width {widths}, sm_90"
    else:
        assert kernel is not None
        assert "; not sm90: TMA needs" in kernel


SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.zeros(2, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.3},
    "mask": {"mask": tk.Mask.causal() & tk.Mask.padding(torch.tensor([50]))},
    "sinks": {"sinks": torch.zeros(2)},
    "dropout": {"dropout_p": 0.1},
    "bias": {"bias": torch.zeros(67, 67)},
    "bias that requires grad": {"bias": torch.zeros(67, 67, requires_grad=True)},
    "alibi": {"bias": tk.Alibi(SLOPES)},
    "relative bias": {"relative": tk.relative_bias(TABLE, lowest=-3)},
    "relative bias that requires grad": {
        "relative": tk.relative_bias(TABLE.clone().requires_grad_(), lowest=-3)
    },
}
GRADIENTS_BY_SM80 = {
    "bias that requires grad": "dbias",
    "relative bias that requires grad": "drelative_bias",
}


@pytest.mark.parametrize("D", [24, 64, 128, 136])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, D: int) -> None:
    """The sm90 kernels compute all gradients except those of biases, under every option."""
    options = OPTIONS[name]
    x = [torch.randn(1, 2, 67, D).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    tk.attention(*x, backend="cuda", **options).sum().backward()
    kernel = explain(*x, backend="cuda", **options).kernel
    assert kernel is not None
    assert emulator.latest_launch().startswith("(sm90::backward_postprocess")
    assert kernel.startswith("csrc/cuda/sm90")
    assert "sm80 backward" not in kernel
    if name in GRADIENTS_BY_SM80:
        assert kernel.endswith(f"; csrc/cuda/sm80 for {GRADIENTS_BY_SM80[name]}")
    else:
        assert "sm80" not in kernel


def test_gradients_that_tma_cannot_store() -> None:
    """Gradient rows of 60 bytes: the backward pass runs the sm80 kernels."""
    rows = torch.randn(1, 2, 67, 32).to(torch.bfloat16)
    x = [rows[..., :30].requires_grad_(), rows[..., :30], rows[..., :24]]
    tk.attention(*x, backend="cuda").sum().backward()
    kernel = explain(*x, backend="cuda").kernel
    assert kernel is not None
    assert kernel.startswith("csrc/cuda/sm90 forward, csrc/cuda/sm80 backward")
    assert emulator.latest_launch().startswith("(dq_postprocess_kernel")


@pytest.mark.exhaustive
def test_other_architectures_run_the_sm80_kernel() -> None:
    q = torch.randn(1, 2, 3, 64).to(torch.float16)
    assert runs_sm90(q, q, q)
    with emulator.chip(80):
        assert not runs_sm90(q, q, q)
    with emulator.emulation(SMALL), emulator.chip(90):
        assert not runs_sm90(q, q, q)


@pytest.mark.exhaustive
def test_environment_variable_disables_the_sm90_kernels() -> None:
    program = """
import torch, transformer_kernels as tk
from tests.support import emulator
emulator.install()
q = torch.randn(1, 2, 3, 64).to(torch.float16)
with emulator.chip(90):
    tk.attention(q, q, q, backend="cuda")
    print(emulator.latest_launch())
"""
    for switch, kernel in (("0", "(forward_kernel<"), ("1", "(sm90::forward_kernel<")):
        environ = {**os.environ, HOPPER_SWITCH: switch}
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert result.stdout.splitlines()[-1].startswith(kernel), result.stderr


@pytest.mark.exhaustive
def test_l2_swizzle_with_several_groups_of_heads() -> None:
    """The keys and values of two heads fill 24 MB, so the fifth head forms an L2 group alone."""
    visible = 100
    k = torch.zeros(1, 5, 12288, 256, dtype=torch.bfloat16)
    q = torch.randn(1, 5, 130, 256).to(k.dtype)
    k[:, :, :visible].normal_()
    mask = tk.Mask.padding(torch.tensor([visible]))
    o = tk.attention(q, k, k, mask=mask, backend="cuda")
    assert emulator.latest_launch() == FORWARD_KERNEL
    few = k[:, :, :visible]
    assert torch.equal(o, tk.attention(q, few, few, backend="cuda"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("D", [64, 256])
def test_bits_do_not_depend_on_how_a_mask_is_written(D: int) -> None:
    """The row blocks of a plain call end with the last query, those with a dense mask do not."""
    M = 391
    q, k, v = (3.0 * torch.randn(1, 2, M, D, dtype=torch.bfloat16) for _ in range(3))
    masks = tk.Mask.causal(), tk.Mask.dense(torch.ones(M, M, dtype=torch.bool).tril())
    o, same = (tk.attention(q, k, v, mask=mask, backend="cuda") for mask in masks)
    assert emulator.latest_launch() == FORWARD_KERNEL
    assert torch.equal(o, same)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", [*SAMPLED, *SAMPLED_HOPPER], ids=str)
def test_every_thread_schedule_gives_the_same_bits(case: Case) -> None:
    x = case.inputs(torch.bfloat16)
    assert_same_bits(lambda: case.run(x, "cuda"), 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("case", HOPPER_VARLEN[:2], ids=str)
def test_sequences_without_keys_under_other_schedules(case: VarlenCase, seed: int) -> None:
    """A warp that has nothing to wait for must not run ahead of the others of its warpgroup."""
    with emulator.schedule(seed):
        assert_case(case, torch.bfloat16, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("side", [0, 1], ids=["q", "k"])
def test_unchecked_offsets_stay_within_bounds(side: int) -> None:
    operators = operators_of("cuda")
    x = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16)
    with emulator.emulation(RACES), emulator.chip(90):
        assert_offsets_are_clamped(
            operators.attention_forward, operators.attention_backward, x, side
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*SAMPLED, *RACE_CASES, HOPPER_VARLEN[0]], ids=str)
def test_no_data_races(case: AnyCase) -> None:
    x = case.inputs(torch.bfloat16)
    assert_no_races(lambda: case.run(x, "cuda"), chip=90)
