"""Every instruction set that is compiled in, on the whole table of cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_kernels as tk
from tests.support.attention import Relative
from tests.support.backends import DTYPES, ISAS, forced_isa
from tests.support.case import assert_case
from tests.support.cases import CASES, Case
from tests.support.masks import Window
from tests.support.runtime import one_thread, threads
from tests.support.tiers import crossed
from transformer_kernels import _C

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
WIDE = [
    replace(case, name=f"{case.name}-wide", M=case.M + 40)
    for case in CASES
    if 64 < case.M <= 256 and (case.M - 1) % 64 < 32
]
"""Cases whose last block of 64 queries is at least half full. Without AMX the others have blocks of
32 in the forward pass."""
NEEDED = {
    "portable": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "avx512_bf16"),
    "amx": (*AVX512, "amx_bf16"),
}


def runs_here(name: str) -> bool:
    features = _C.cpu_features()
    return all(features.get(feature, False) for feature in NEEDED[name])


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces one instruction set and one thread, which then processes whole heads."""
    with forced_isa(request.param), one_thread():
        yield request.param


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "isa", "dtype"),
    crossed([*CASES, *WIDE], itertools.product(ISAS, (torch.float32, torch.bfloat16))),
    indirect=["isa"],
)
def test_case(case: Case, dtype: torch.dtype, isa: str) -> None:
    assert _C.isa() == isa
    assert_case(case, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_explain_names_the_kernel(dtype: torch.dtype, isa: str) -> None:
    x = torch.randn(1, 2, 300, 16, dtype=dtype)
    is_double = dtype == torch.float64
    real = "float64" if is_double else "float32"
    engine = "amx" if isa == "amx" and not is_double else "fma"
    if isa == "avx512_bf16" and dtype == torch.bfloat16:
        engine = "dot"
    queries = 32 if engine != "fma" and dtype == torch.bfloat16 else 64
    whole = f"csrc/cpu/attention/forward.h, {isa}, {engine} in {real}, tiles of {queries} x 64"
    assert tk.explain(x, x, x).kernel == whole
    few = f"csrc/cpu/attention/decode.h, {isa}, in {real}"
    assert tk.explain(x[:, :, :2], x, x).kernel == few
    packed = x[0].transpose(0, 1)
    for lengths, kernel in (([0, 2, 4], few), ([0, 2, 300], whole)):
        cu_seqlens = torch.tensor(lengths)
        explained = tk.explain(packed, packed, packed, cu_seqlens, operator=tk.attention_varlen)
        assert explained.kernel == kernel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("all-masks", "gqa-everything", "primes")],
    ids=str,
)
def test_other_dtypes(case: Case, dtype: torch.dtype, isa: str) -> None:
    assert_case(case, dtype, "cpu")


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dtype", "isa", "bias"),
    crossed(DTYPES[1:], itertools.product(ISAS, ("1hmn", "11mn"))),
    indirect=["isa"],
)
def test_bias_gradient_larger_than_the_caches(dtype: torch.dtype, isa: str, bias: str) -> None:
    """Written with non-temporal stores; every other half-precision row is 64-byte aligned."""
    case = Case(
        name="large-bias", B=1, M=1030, N=1040 if bias == "1hmn" else 2080, bias=bias,
        mask=Window(700, 0),
    )  # fmt: skip
    assert_case(case, dtype, "cpu")


PHASES = (
    # Query heads that share a key head, wide enough for several phases of the backward pass on one
    # thread, whose limits are within heads.
    Case(name="phases", B=1, H_q=4, H_kv=1, M=390, N=650, D=512, D_v=512, dlse=True,
         mask=Window(300, 20)),
    # The separate pass of this bias gradient reads the operands of all phases.
    Case(name="phases-bias", B=1, H_q=4, H_kv=1, M=390, N=70, D=512, D_v=512, bias="11mn"),
    # Sums by distance are accumulated over all phases.
    Case(name="phases-relative", B=1, H_q=3, H_kv=1, M=850, N=70, D=256, D_v=256,
         relative=Relative(333, -20, kind="both")),
)  # fmt: skip

BLOCKS = (
    # The maximum grows at every key block in the first heads, at every second or third block in the
    # others. Pending products use the old maximum; o is rescaled to the new one.
    Case(name="rising", B=1, H_q=4, H_kv=2, M=70, N=645, D=40, D_v=72, alibi="bottom_right"),
    # All query chunks of the gradients share the memory of their packed operands and of dq.
    Case(name="chunks", M=330, N=70, D=200, D_v=136, dlse=True, mask=Window(280, 20)),
    # Fully masked keys at both ends. Heads of three query blocks share a key head, so that every
    # other pair of query blocks spans two heads.
    Case(name="left-out", B=1, H_q=4, H_kv=2, M=190, N=620,
         mask=Window(200, -150, "bottom_right"), hidden="nan"),
    *PHASES,
)  # fmt: skip


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks_of_keys_and_queries(case: Case, dtype: torch.dtype, isa: str) -> None:
    assert_case(case, dtype, "cpu")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PHASES, ids=str)
def test_phases_of_queries_on_several_threads(case: Case, dtype: torch.dtype, isa: str) -> None:
    """The threads share the keys of the only head. Gradients do not depend on their timing."""
    longer = replace(case, name=f"{case.name}-threads", M=4 * case.M)
    with threads(3):
        assert_case(longer, dtype, "cpu")
        first, second = (longer.run(longer.inputs(dtype), "cpu") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("poisoned")
def test_infinity_in_the_last_phase(isa: str) -> None:
    """AMX finds it after the gradients of earlier queries, and repeats the call without AMX."""
    q, do = torch.randn(2, 1, 4, 290, 512)
    k, v = torch.randn(2, 1, 1, 70, 512)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = tk.attention(*leaves, backend="cpu")
    finite = torch.autograd.grad(o, leaves, do, retain_graph=True)
    infinite = do.clone()
    infinite[:, -1, -1, 0] = torch.inf
    dq, dk, dv = torch.autograd.grad(o, leaves, infinite)
    assert not dq[:, -1, -1].isfinite().any()
    assert not dk.isfinite().any()
    torch.testing.assert_close(dq[:, :-1], finite[0][:, :-1])
    torch.testing.assert_close(dq[:, -1, :-1], finite[0][:, -1, :-1])
    torch.testing.assert_close(dv[..., 1:], finite[2][..., 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_wide_grouped_heads(dtype: torch.dtype, isa: str) -> None:
    """The backward pass takes little more memory than its gradients and copies of k and v. All
    packed queries, and a dq for each split of the keys, would take 128 MiB."""
    q = torch.randn(1, 8, 1024, 512, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, 1, 1024, 512, dtype=dtype, requires_grad=True) for _ in range(2))
    with threads(2):
        o = tk.attention(q, k, v, mask=tk.Mask.window(1, 0), backend="cpu")
        before = _C.poisoned_bytes()
        _C.want_poison(True)
        try:
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        finally:
            _C.want_poison(False)
    gradients = (q.numel() + 2 * k.numel()) * q.element_size()
    assert _C.poisoned_bytes() - before - gradients < 32 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_transposed_output_gradient(dtype: torch.dtype, isa: str) -> None:
    """Gradients are the same for a do whose rows are not contiguous and for its contiguous copy."""
    leaves = [torch.randn(1, 2, 64, 64).to(dtype).requires_grad_() for _ in range(3)]
    do = torch.randn(1, 2, 64, 64).to(dtype).mT
    o = tk.attention(*leaves, backend="cpu")
    from_transposed = torch.autograd.grad(o, leaves, do, retain_graph=True)
    from_contiguous = torch.autograd.grad(o, leaves, do.contiguous())
    torch.testing.assert_close(from_transposed, from_contiguous)


def test_dropout_mask_equals_that_of_the_reference(isa: str) -> None:
    q, k, v = torch.zeros(1, 1, 65, 1), torch.zeros(1, 1, 200, 1), torch.eye(200)[None, None]
    kept = tk.attention(q, k, v, dropout_p=0.5, seed=9, backend="cpu") != 0
    reference = tk.attention(q, k, v, dropout_p=0.5, seed=9, backend="reference") != 0
    assert torch.equal(kept, reference)


def test_built_isas_ascend_and_the_best_one_runs(pytestconfig: pytest.Config) -> None:
    """portable is always built. The best supported one runs, unless --isa forces another. Without
    AMX that is avx512_bf16 on CPUs of AMD only."""
    built = _C.built_isas()
    assert built[0] == "portable"
    assert built == [name for name in NEEDED if name in built]
    supported = [name for name in built if runs_here(name)]
    if supported[-1] == "avx512_bf16" and "AuthenticAMD" not in Path("/proc/cpuinfo").read_text():
        supported.pop()
    best = supported[-1]
    forced = pytestconfig.getoption("isa") or best
    assert _C.isa() == forced.removeprefix("emulated-")


def test_unknown_isa_raises_value_error() -> None:
    with pytest.raises(ValueError, match="no kernels are built for 'sse9'"):
        _C.force_isa("sse9")
    assert _C.isa() in _C.built_isas()


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("bits", range(0, 1 << 16, 1 << 12))
def test_every_half_precision_value_passes_unchanged(bits: int, queries: int, isa: str) -> None:
    """With one visible key o = v, bit for bit, for every v; NaN stays NaN. In the packed path AMX
    and vdpbf16ps flush bfloat16 values up to the smallest normal number to zero."""
    for dtype in (torch.float16, torch.bfloat16):
        v = torch.arange(bits, bits + (1 << 12)).to(torch.int16).view(dtype).reshape(-1, 1, 1, 64)
        q = torch.zeros(v.shape[0], 1, queries, 8, dtype=dtype)
        o, v = torch.broadcast_tensors(tk.attention(q, q[:, :, :1], v, backend="cpu"), v)
        assert torch.equal(o.isnan(), v.isnan())
        kept = ~v.isnan()
        if isa in ("avx512_bf16", "amx") and queries > 1 and dtype == torch.bfloat16:
            kept &= v.abs() > torch.finfo(dtype).tiny
        assert torch.equal(o[kept], v[kept])


@pytest.mark.parametrize("largest", [3.0e38, 3.4e38, float("inf")])
def test_the_largest_floats_pass_unchanged(largest: float, isa: str) -> None:
    """The first bfloat16 part of 3.4e38 would be infinite, and the rest NaN. 40 queries take the
    packed path, which splits float32 into parts."""
    v = torch.tensor([largest, -largest, 1.0, 0.0]).reshape(1, 1, 1, 4)
    q, k = torch.zeros(1, 1, 40, 4), torch.zeros(1, 1, 1, 4)
    o = tk.attention(q, k, v, backend="cpu")
    assert torch.equal(o, v.expand(1, 1, 40, 4))
