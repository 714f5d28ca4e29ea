"""CUDA kernels in the emulator, beyond the tests shared by all backends.

Covers the tiles of other chips, other thread orders, race detection, memory poisoning and relative
keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.emulated import Emulation
from building.tile_config import RELATIVE_WIDTHS, WIDTHS
from tests.gpu.sanitizer_targets import ATTENTION_TARGETS
from tests.kernels.cuda.schedules import LARGE, SMALL, assert_no_races, assert_same_bits
from tests.support import emulator
from tests.support.attention import Relative
from tests.support.backends import NOT_EMULATED
from tests.support.case import AnyCase, assert_case, named
from tests.support.cases import CASES, Case
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from tests.support.masks import CAUSAL_END
from tests.support.operators import operator_arguments
from tests.support.runtime import poisoned_memory
from tests.support.tiers import crossed, each
from tests.support.varlen_cases import VARLEN_CASES, VarlenCase
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.problem.varlen import one_entry, varlen_problem

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

SUPPORTED = [case for case in CASES if max(case.D, case.D_v) <= 256]
WATCHED_CASES = named(CASES, *ATTENTION_TARGETS)
WATCHED_DECODE_CASES = named(
    DECODE_CASES,
    *("plain", "long-pages", "pages-group-8-queries-17", "pages-of-24", "unaligned-16"),
    "relative-everything",
)
WATCHED_VARLEN_CASES = named(
    VARLEN_CASES, "relative-end", "relative-shared-end", "relative-everything"
)
DTYPES = (torch.bfloat16, torch.float32)


@each("case", CASES, ids=str)
def test_auto_never_chooses_the_emulated_backend_on_a_cpu(case: Case) -> None:
    x = case.inputs(torch.float32)
    assert tk.explain(x.q, x.k, x.v, mask=case.make_mask(), bias=x.bias).chosen == "cpu"


def test_long_float32_sums_do_not_drift() -> None:
    """Tensor cores truncate sums towards zero; all terms of this sum have the same sign."""
    q, k = torch.randn(1, 1, 16, 32), torch.randn(1, 1, 4096, 32)
    v = 1 + torch.rand(1, 1, 4096, 32)
    o = tk.attention(q, k, v, backend="cuda")
    exact = tk.attention(*(x.double() for x in (q, k, v)), backend="reference")
    plain = tk.attention(q, k, v, backend="reference")
    assert_within_rule("o", o, exact, plain)


OFFSETS = {
    "bias": VarlenCase(
        name="relative-offsets",
        lengths=((5, 131), (33, 20), (1, 70)),
        relative=Relative(99, -40, "bottom_right", shared=True),
        H_q=4,
    ),
    "keys": VarlenCase(
        name="keys-offsets",
        lengths=((5, 131), (33, 20), (1, 70), (0, 3)),
        relative=Relative(99, -40, "bottom_right", shared=True, kind="keys"),
        H_q=4,
        D=24,
        D_v=24,
        mask=CAUSAL_END,
    ),
}
"""Sequences with several offsets, whose gradients CTAs add in tiles."""


@pytest.mark.parametrize("kind", OFFSETS)
def test_relative_gradients_have_the_same_bits_under_every_schedule(kind: str) -> None:
    """Also without deterministic algorithms. With keys no sum is atomic."""
    assert not torch.are_deterministic_algorithms_enabled()
    case = OFFSETS[kind]
    x = case.inputs(torch.float32)

    def run() -> dict[str, Tensor]:
        results = case.run(x, "cuda")
        return results if kind == "keys" else {"dtable": results["dtable"]}

    assert_same_bits(run, 4)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_keys_of_packed_sequences_with_several_offsets(dtype: torch.dtype) -> None:
    assert_case(OFFSETS["keys"], dtype, "cuda")


TILES = [
    *(
        Case(name="relative-tile", relative=Relative(200, -130), B=1, M=70, N=135, D=width,
             D_v=width, mask=CAUSAL_END)
        for width in WIDTHS
    ),
    *(
        Case(name="keys-tile", relative=Relative(200, -130, kind="both"), B=1, M=70, N=135,
             D=width, D_v=width, mask=CAUSAL_END, bias="11mn", dropout_p=0.2)
        for width in RELATIVE_WIDTHS
    ),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TILES, ids=lambda case: f"{case.name}-{case.D}")
@pytest.mark.parametrize("emulation", [LARGE, SMALL], ids=["large", "small"])
def test_relative_gradients_of_every_tile(
    emulation: Emulation, case: Case, dtype: torch.dtype
) -> None:
    with emulator.emulation(emulation):
        assert_case(case, dtype, "cuda")


def test_distances_of_padded_rows_are_not_read() -> None:
    """The last six rows see the keys 128 to 255, all of a tile. Rows of padding would read NaN."""
    M, left = 262, 133
    x = [torch.randn(1, 1, M, 16).bfloat16().requires_grad_() for _ in range(3)]
    table = torch.full((1, M), math.nan)
    table[:, : left + 1] = 0.5
    o = tk.attention(
        *x,
        mask=tk.Mask.window(left, 0),
        relative=tk.relative_bias(table.requires_grad_(), lowest=0),
        backend="cuda",
    )
    grads = torch.autograd.grad(o.float().sin().sum(), (*x, table))
    assert all(y.isfinite().all() for y in (o, *grads))


@pytest.mark.parametrize("kind", ["bias", "keys"])
def test_no_distance_beyond_the_table_is_read(kind: str) -> None:
    """max_seqlen is not checked on a device: sequences may be longer. Only rows within it, of which
    each sees every key, have defined results."""
    rows, bound = 70, 40
    q = torch.randn(rows, 1, 16)
    starts = torch.tensor([0, rows])
    nan = torch.full((3, 2 * bound - 1, *((16,) if kind == "keys" else ())), math.nan)
    nan[1] = 0.5
    relative = tk.relative_keys if kind == "keys" else tk.relative_bias
    problem = varlen_problem(q, q, q, starts, relative=relative(nan[1:2], lowest=0))
    packed = one_entry(q)
    given = dict(zip((field.name for field in FIELDS), problem.pack(), strict=True))
    given |= {"max_seqlen_q": bound, "max_seqlen_k": bound, f"relative_{kind}": nan[1:2]}
    operators = torch.ops.transformer_kernels_emulated
    o, row_stats, _ = operators.attention_forward(packed, packed, packed, **given)
    assert o[:, :, :bound].isfinite().all()
    assert row_stats[..., :bound].isfinite().all()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *crossed([*SUPPORTED, *DECODE_CASES], ((dtype,) for dtype in DTYPES)),
        *crossed(VARLEN_CASES, ((torch.bfloat16,),)),
    ],
)
def test_small_shared_memory_tiles(case: AnyCase, dtype: torch.dtype) -> None:
    with emulator.emulation(SMALL):
        assert_case(case, dtype, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("emulation", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("case", WATCHED_CASES, ids=str)
def test_non_deterministic_gradients_are_correct_under_every_thread_order(
    case: Case, emulation: Emulation, dtype: torch.dtype
) -> None:
    """Without deterministic algorithms, CTAs add to dq in any order."""
    assert not torch.are_deterministic_algorithms_enabled()
    for seed in range(3):
        with emulator.emulation(emulation), emulator.schedule(seed):
            assert_case(case, dtype, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("emulation", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize(
    "case", [*WATCHED_CASES, *WATCHED_VARLEN_CASES, *WATCHED_DECODE_CASES], ids=str
)
def test_results_have_the_same_bits_under_every_schedule(
    case: AnyCase, emulation: Emulation, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Gradients in deterministic mode; decoding without it."""
    if not isinstance(case, DecodeCase):
        request.getfixturevalue("deterministic")
    x = case.inputs(dtype)
    with emulator.emulation(emulation):
        assert_same_bits(lambda: case.run(x, "cuda"), 5)


@pytest.mark.usefixtures("deterministic", "poisoned")
@pytest.mark.parametrize("chip", [80, 90])
def test_deterministic_mode_without_queries(chip: int) -> None:
    """The counter of CTAs is then not cleared, and must not be read."""
    (case,) = (one for one in CASES if one.name == "no-queries")
    with emulator.chip(chip):
        assert_case(replace(case, D=64, D_v=64), torch.float16, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", [*WATCHED_DECODE_CASES, *WATCHED_VARLEN_CASES, OFFSETS["keys"]], ids=str
)
def test_decoding_and_packed_sequences_have_no_races(case: AnyCase, dtype: torch.dtype) -> None:
    x = case.inputs(dtype)
    assert_no_races(lambda: case.run(x, "cuda"), 3)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ctas", [1, 2, 40])
@pytest.mark.parametrize(
    "case", named(DECODE_CASES, "full", "long-pages", "group-8-queries-17"), ids=str
)
def test_decoding_on_any_number_of_ctas(case: DecodeCase, ctas: int) -> None:
    """Few CTAs process many units each, and many divide a unit."""
    with emulator.aimed_ctas(ctas):
        assert_case(case, torch.bfloat16, "cuda")


def test_caches_of_too_many_tiles_raise() -> None:
    """Their number must fit an int. Neither queries nor keys occupy memory."""
    q = torch.zeros(1, 1, 1, 8).expand(2048, 64, 1, 8)
    cache = torch.zeros(1, 1, 1, 8).expand(2048, 64, 1 << 20, 8)
    lengths = torch.zeros(2048, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"capacity of more than 2\^30 tiles of keys"):
        tk.attention_decode(q, cache, cache, lengths, backend="cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WATCHED_CASES, ids=str)
def test_forward_and_backward_have_no_races(
    case: Case, dtype: torch.dtype, is_deterministic: bool, request: pytest.FixtureRequest
) -> None:
    if is_deterministic:
        request.getfixturevalue("deterministic")
    x = case.inputs(dtype)
    assert_no_races(lambda: case.run(x, "cuda"))


def test_outputs_and_workspaces_are_poisoned() -> None:
    q, k, v = (torch.randn(1, 2, 67, 32, requires_grad=True) for _ in range(3))

    def step() -> int:
        before = emulator.poisoned_bytes()
        o, lse = tk.attention(q, k, v, return_lse=True, backend="cuda")  # by the operators
        torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
        return emulator.poisoned_bytes() - before

    assert step() == 0
    with poisoned_memory():
        outputs = 4 * q.nbytes + 4 * 2 * 67
        dq_sums = q.nbytes
        assert step() > outputs + dq_sums


@each(
    ("options", "decodes"),
    [
        ({}, True),
        ({"mask": tk.Mask.window(500, 3), "softcap": 2.0}, True),
        ({"mask": tk.Mask.padding(torch.tensor([1000]))}, True),
        ({"relative": tk.relative_bias(torch.zeros(1, 5), lowest=-2)}, True),
        ({"relative": tk.relative_keys(torch.zeros(1, 5, 8), lowest=-2)}, False),
        ({"bias": torch.zeros(1, 1, 1, 1024)}, False),
        ({"mask": tk.Mask.dense(torch.ones(1024, dtype=torch.bool))}, False),
        ({"dropout_p": 0.5, "seed": 0}, False),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_explain_names_the_kernels_of_few_queries(options: dict[str, Any], decodes: bool) -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 1024, 8)
    tk.attention(q, k, k, backend="cuda", **options)
    assert ("decode" in emulator.latest_launch()) == decodes
    kernel = tk.explain(q, k, k, backend="cuda", **options).kernel
    assert kernel is not None
    assert ("decode" in kernel) == decodes


@each(
    ("D", "D_v", "width"), [(1, 1, 32), (33, 8, 64), (64, 65, 96), (128, 128, 128), (5, 256, 256)]
)
def test_explain_names_the_tiles_of_ampere(D: int, D_v: int, width: int) -> None:
    q, v = torch.randn(1, 2, 3, D), torch.randn(1, 2, 3, D_v)
    of = f"float32, width {width}, sm_80"
    assert tk.explain(q, q, v, backend="cuda").kernel == f"csrc/cuda/sm80, {of}"
    lengths = torch.tensor([3])
    decoded = tk.explain(q, q, v, lengths, backend="cuda", operator=tk.attention_decode)
    assert decoded.kernel == f"csrc/cuda/sm80/decode, {of}"


@pytest.mark.parametrize(
    ("B", "H_q", "H_kv", "M", "N", "decodes"),
    [
        (1, 8, 2, 4, 1024, True),
        (32, 8, 4, 3, 1024, True),
        (31, 8, 8, 3, 1024, True),
        (32, 8, 8, 3, 1024, False),
        (1, 8, 2, 5, 1024, False),
        (1, 8, 2, 4, 1023, False),
    ],
)
def test_explain_tells_decoding_from_a_forward_pass(
    B: int, H_q: int, H_kv: int, M: int, N: int, decodes: bool
) -> None:
    q, k = torch.randn(B, H_q, M, 8), torch.randn(B, H_kv, N, 8)
    decoded = "csrc/cuda/sm80/decode forward, csrc/cuda/sm80 backward"
    kernel = str(tk.explain(q, k, k, backend="cuda").kernel)
    assert kernel.startswith(f"{decoded if decodes else 'csrc/cuda/sm80'}, float32")


def test_launch_errors_are_raised() -> None:
    """The operator checks the width itself; on a device it also raises CUDA errors."""
    q = torch.randn(1, 1, 3, 257)
    forward = torch.ops.transformer_kernels_emulated.attention_forward
    with pytest.raises(RuntimeError, match="head dimensions are wider than the widest tile"):
        forward(**operator_arguments(q, q, q))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_of_hidden_distances_may_hold_nan(dtype: torch.dtype) -> None:
    """Distances outside the window are in the bands of tiles, as those of rows of padding are."""
    M, N, left, right = 70, 133, 20, 9
    torch.manual_seed(0)
    x = [torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (M, N, N)]
    keys = torch.randn(1, left + right + 1, 16).to(dtype)

    def run(hidden: float) -> tuple[Tensor, ...]:
        around = torch.full((1, 50, 16), hidden).to(dtype)
        table = torch.cat((around, keys, around), dim=1).requires_grad_()
        relative = tk.relative_keys(table, lowest=-right - 50)
        o = tk.attention(*x, mask=tk.Mask.window(left, right), relative=relative, backend="cuda")
        return o, *torch.autograd.grad(o.float().sin().sum(), (*x, table))

    zero, nan = run(0.0), run(math.nan)
    assert all(torch.equal(y, z) for y, z in zip(zero, nan, strict=True))
    assert nan[4][:, 50:-50].abs().amin(dim=-1).min() > 0
    assert not nan[4][:, :50].any()
    assert not nan[4][:, -50:].any()


def test_keys_with_a_cache_are_not_supported() -> None:
    q, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 8, 16)
    relative = tk.relative_keys(torch.randn(1, 3, 16), lowest=0, align="bottom_right")
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="relative_keys with a cache"):
        tk.attention_decode(q, cache, cache, lengths, relative=relative, backend="cuda")


def test_hopper_runs_the_kernels_of_sm80_for_keys() -> None:
    q = torch.randn(1, 2, 130, 64, dtype=torch.float16, requires_grad=True)
    relative = tk.relative_keys(torch.randn(2, 9, 64, requires_grad=True), lowest=-4)
    with emulator.chip(90):
        choice = tk.explain(q, q, q, relative=relative, backend="cuda")
        o = tk.attention(q, q, q, relative=relative, backend="cuda")
        assert "forward_kernel<Element, kWidth, kProducts>" in emulator.latest_launch()
        torch.autograd.grad(o.sum(), (q, relative.keys))
        assert "relative_keys_sum_kernel" in emulator.latest_launch()
    assert "csrc/cuda/sm80/relative, float16, width 64" in str(choice)
