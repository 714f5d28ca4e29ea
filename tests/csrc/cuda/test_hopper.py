"""The kernels for Hopper (csrc/cuda/sm90) in the emulator: what they take, and that it is right."""

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
from building.emulated import Emulation
from building.extension import ROOT
from tests.csrc.cuda.hopper_cases import HOPPER_CASES, HOPPER_VARLEN
from tests.gpu.sanitizer_targets import WATCHED
from tests.support import emulator
from tests.support.cases import CASES, Case, inputs
from tests.support.emulated import NOT_EMULATED
from tests.support.evaluate import assert_case, by_backend
from tests.support.tiers import sampled
from tests.support.varlen_cases import (
    VARLEN_CASES,
    VarlenCase,
    assert_varlen_case,
    varlen_by_backend,
    varlen_inputs,
)
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.functional.explain import explain

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

RACES = Emulation(races=True)
TAKEN = [case for case in (*CASES, *HOPPER_CASES) if max(case.D, case.D_v) <= 256]
HALVES = [
    case
    for case in TAKEN
    if case.name.startswith(("width-", "wide-", "causal", "padding", "works", "persistent-1"))
    or case.name in (*WATCHED, "all-masks", "steep", "scale-negative", "softcap-bias", "dropout")
]
"""Those that are also run in float16"""
SOME = [case for case in TAKEN if case.name in WATCHED]
SOME_HOPPER = [
    case
    for case in HOPPER_CASES
    if case.name
    in (
        "persistent",
        "persistent-128",
        "range-nan",
        "documents-nan",
        "wide-keys-192",
        "queries-256",
    )
]
SOME_RACES = [
    case
    for case in HOPPER_CASES
    if case.name in ("works", "short-works", "lengths-nan", "queries-256", "dropout-queries")
]
LAUNCHED = "(sm90::forward_kernel<Element, kWidth, kVWidth>)"


@pytest.fixture(autouse=True)
def _hopper() -> Iterator[None]:
    with emulator.chip(90):
        yield


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", sampled(TAKEN))
def test_case(case: Case) -> None:
    assert_case(case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_case_in_float16(case: Case) -> None:
    assert_case(case, torch.float16, "cuda")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", sampled([*VARLEN_CASES, *HOPPER_VARLEN]))
def test_packed(case: VarlenCase) -> None:
    assert_varlen_case(case, torch.bfloat16, "cuda")


def is_hoppers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel that attends is one of csrc/cuda/sm90; and that this is what is told."""
    with torch.no_grad():
        tk.attention(q, k, v, backend="cuda")
    launched = emulator.latest_launch()
    assert "forward_kernel" in launched
    told = explain(q, k, v, backend="cuda").kernel
    assert told is not None
    assert ("sm90" in told) == (launched == LAUNCHED), told
    return launched == LAUNCHED


def test_explain_tells_which_kernels_run() -> None:
    """They take rows that begin at multiples of 16 bytes and lie apart."""
    for case in CASES:
        if max(case.D, case.D_v) > 256 or 0 in (case.B, case.M):
            continue  # nothing is launched
        x = inputs(case, torch.bfloat16)
        in_eights = case.D % 8 == case.D_v % 8 == 0
        odd = case.layout in ("unaligned", "expanded") or case.N == 0
        assert is_hoppers(x.q, x.k, x.v) == (in_eights and not odd), case.name


@pytest.mark.parametrize("case", SOME, ids=str)
def test_float32_is_for_others(case: Case) -> None:
    x = inputs(case, torch.float32)
    assert not is_hoppers(x.q, x.k, x.v)


def lengthened(x: Tensor, rows: int) -> Tensor:
    """The same numbers, in front of rows of NaN."""
    return torch.cat([x, x.new_full((*x.shape[:2], rows, x.shape[3]), torch.nan)], dim=2)


ROWS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "contiguous": (True, lambda x: x),
    "heads inside": (True, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "batch inside": (True, lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
    "a part of longer rows": (True, lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]]),
    "a part of longer ones": (True, lambda x: lengthened(x, 3)[:, :, : x.shape[2]]),
    "every second element": (True, lambda x: x.repeat_interleave(2, dim=3)[..., ::2]),
    "every second row": (True, lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2]),
    "one head for all": (False, lambda x: x[:, :1].expand(x.shape)),
    "one entry for all": (False, lambda x: x[:1].expand(x.shape)),
    "one row for all": (False, lambda x: x[:, :, :1].expand(x.shape)),
    "a step of 60 bytes": (False, lambda x: x[..., :30].contiguous()),
    "a step of 76 bytes": (
        False,
        lambda x: torch.cat([x, x], dim=3)[..., :38].contiguous()[..., :32],
    ),
    "8 bytes further": (False, lambda x: torch.cat([x, x], dim=3)[..., 4:36]),
}


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_in_memory(name: str, which: str) -> None:
    """Of one tensor: what TMA cannot read sm80's kernels do, and both are right."""
    is_taken, lay_out = ROWS[name]
    x = {name: torch.randn(2, 2, 67, 32).to(torch.bfloat16) for name in "qkv"}
    width = x[which].shape[3]
    x[which] = lay_out(x[which])
    if (narrow := x[which].shape[3]) != width and which != "v":
        x |= {other: x[other][..., :narrow] for other in "qk"}
    assert is_hoppers(**x) == is_taken
    exact = tk.attention(*(one.double() for one in x.values()), backend="reference")
    o = tk.attention(x["q"], x["k"], x["v"], backend="cuda")
    torch.testing.assert_close(o.double(), exact, atol=0.02, rtol=0.02)


def test_a_width_that_is_not_of_16_bytes_in_rows_that_are() -> None:
    x = torch.randn(2, 2, 67, 32).to(torch.bfloat16)
    x[..., 30:] = torch.nan
    q, v = x[..., :30], x[..., :24]
    assert is_hoppers(q, q, v)
    assert not is_hoppers(q, q, q)  # o has rows of 60 bytes
    exact = tk.attention(q.double(), q.double(), v.double(), backend="reference")
    o = tk.attention(q, q, v, backend="cuda")
    torch.testing.assert_close(o.double(), exact, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
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
    assert is_hoppers(q, q, v) == (widths is not None)
    told = explain(q, q, v, backend="cuda").kernel
    if widths is not None:
        assert told == f"csrc/cuda/sm90, float16, width {widths}, emulated"


SLOPES = torch.tensor([0.5, 0.25])
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
}


@pytest.mark.parametrize("D", [24, 64, 128, 136])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, D: int) -> None:
    """Of whatever option; but that of a bias is sm80's, as it is told."""
    options = OPTIONS[name]
    x = [torch.randn(1, 2, 67, D).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    tk.attention(*x, backend="cuda", **options).sum().backward()
    told = explain(*x, backend="cuda", **options).kernel
    assert told is not None
    assert emulator.latest_launch().startswith("(sm90::dq_postprocess")
    assert told.startswith("csrc/cuda/sm90")
    assert "sm80 backward" not in told
    assert ("sm80 for dbias" in told) == (name == "bias that requires grad")


def test_gradients_that_tma_cannot_write() -> None:
    """Rows of 60 bytes: sm80's kernels have the backward pass, as it is told."""
    rows = torch.randn(1, 2, 67, 32).to(torch.bfloat16)
    x = [rows[..., :30].requires_grad_(), rows[..., :30], rows[..., :24]]
    tk.attention(*x, backend="cuda").sum().backward()
    told = explain(*x, backend="cuda").kernel
    assert told is not None
    assert told.startswith("csrc/cuda/sm90 forward, csrc/cuda/sm80 backward")
    assert emulator.latest_launch().startswith("(dq_postprocess_kernel")


def test_wider_rows_are_refused() -> None:
    q = torch.randn(1, 2, 3, 257).to(torch.float16)
    with pytest.raises(ValueError, match="rows of 257 elements: tiles are up to 256 wide"):
        tk.attention(q, q, q, backend="cuda")


@pytest.mark.exhaustive
def test_other_chips_have_other_kernels() -> None:
    q = torch.randn(1, 2, 3, 64).to(torch.float16)
    assert is_hoppers(q, q, q)
    with emulator.chip(80):
        assert not is_hoppers(q, q, q)
    with emulator.emulation(Emulation(arch=860)), emulator.chip(90):
        assert not is_hoppers(q, q, q)


@pytest.mark.exhaustive
def test_they_can_be_switched_off() -> None:
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
        told = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert told.stdout.splitlines()[-1].startswith(kernel), told.stderr


@pytest.mark.exhaustive
def test_heads_in_sections_of_the_cache() -> None:
    """Two heads have 24 MB of keys and values, so that the fifth is in a section of its own."""
    shown = 100
    k = torch.zeros(1, 5, 12288, 256, dtype=torch.bfloat16)
    q = torch.randn(1, 5, 130, 256).to(k.dtype)
    k[:, :, :shown].normal_()
    mask = tk.Mask.padding(torch.tensor([shown]))
    o = tk.attention(q, k, k, mask=mask, backend="cuda")
    assert emulator.latest_launch() == LAUNCHED
    few = k[:, :, :shown]
    assert torch.equal(o, tk.attention(q, few, few, backend="cuda"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", [*SOME, *SOME_HOPPER], ids=str)
def test_every_order_of_threads_gives_the_same_bits(case: Case) -> None:
    runs = []
    for seed in range(4):
        with emulator.schedule(seed):
            runs.append(by_backend(case, inputs(case, torch.bfloat16), "cuda"))
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("case", HOPPER_VARLEN[:2], ids=str)
def test_work_without_keys_under_other_orders(case: VarlenCase, seed: int) -> None:
    """A warp that has nothing to wait for must not lap the others of its group."""
    with emulator.schedule(seed):
        assert_varlen_case(case, torch.bfloat16, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*SOME, *SOME_RACES], ids=str)
def test_nothing_races(case: Case) -> None:
    """The emulator reports accesses that nothing orders, as errors."""
    for seed in range(2):
        with emulator.emulation(RACES), emulator.chip(90), emulator.schedule(seed):
            by_backend(case, inputs(case, torch.bfloat16), "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", HOPPER_VARLEN[:1], ids=str)
def test_nothing_races_in_packed_sequences(case: VarlenCase) -> None:
    """Reported as errors, too."""
    x = varlen_inputs(case, torch.bfloat16, 0.0)
    with emulator.emulation(RACES), emulator.chip(90), emulator.schedule(1):
        varlen_by_backend(case, x, "cuda")
