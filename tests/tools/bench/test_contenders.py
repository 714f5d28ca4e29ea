"""Checks before timing: errors against float64, contenders, and trials that exclude variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tools.bench.example import PROVENANCE
from transformer_kernels.bench import (
    Attend,
    Budget,
    Case,
    Direction,
    Outputs,
    Variant,
    exact_outputs,
    run_once,
    usable_variants,
)
from transformer_kernels.bench.cases import SEED
from transformer_kernels.bench.contenders import Contender, Expected, check, measure_contenders
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.bench.trial import DeviceLostError, check_device, failure_reason, try_out
from transformer_kernels.functional.attention import attention
from transformer_kernels.masks.mask import Mask

GROUPED = Case(name="grouped", B=2, H_q=4, H_kv=2, M=7, N=9, D=4, D_v=3, mask=Mask.window(3, 2))
BIASED = replace(GROUPED, bias=torch.randn(2, 4, 7, 9, dtype=torch.float64, requires_grad=True))
DROPPED = replace(GROUPED, dropout_p=0.5)


@pytest.mark.parametrize("case", [GROUPED, BIASED, DROPPED], ids=["plain", "bias", "dropout"])
def test_exact_outputs_are_float64_of_all_heads_at_once(case: Case) -> None:
    inputs = case.inputs()
    doubles = type(inputs)(*(x.double() for x in inputs))
    exact = exact_outputs(case, inputs)
    whole = run_once(
        lambda q, k, v: attention(
            q, k, v,
            mask=case.mask, bias=case.bias, dropout_p=case.dropout_p, seed=SEED,
            backend="reference",
        ),
        doubles,
        case.learned,
    )  # fmt: skip
    assert exact.tensors().keys() == whole.tensors().keys()
    assert ("dbias" in exact.tensors()) == (case.bias is not None)
    for name, got in exact.tensors().items():
        assert got.dtype == torch.float64
        assert_same_function(got, whole.tensors()[name])


@pytest.mark.parametrize(("direction", "worst"), [("fwd", 0.125), ("bwd", 0.5), ("fwd+bwd", 0.5)])
def test_the_error_is_that_of_the_worst_tensor_relative_to_its_largest_value(
    direction: Direction, worst: float
) -> None:
    exact = Outputs(*(torch.tensor([1.0, -8.0], dtype=torch.float64) for _ in range(4)))
    o, dk = torch.tensor([2.0, -8.0]), torch.tensor([1.0, -4.0])
    got = Outputs(o, exact.dq.float(), dk, exact.dv.float())
    assert got.error(exact, direction) == worst


def test_the_error_includes_the_bias_gradient() -> None:
    one = torch.ones(1, dtype=torch.float64)
    exact = Outputs(one, one, one, one, one)
    got = exact._replace(dbias=one * 1.25)
    assert [got.error(exact, direction) for direction in ("fwd", "bwd")] == [0.0, 0.25]


CASE = Case(name="causal", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8, mask=Mask.causal())


def wrong_by(relative: float) -> Variant:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = right(q, k, v) * (1.0 + relative)
        return o

    (naive,) = usable_variants(["naive"])
    right = naive.attend_for(CASE)
    return Variant("wrong", "wrong", lambda _case: attend)


def test_correct_variants_pass_and_their_outputs_are_kept() -> None:
    checked = check(CASE, usable_variants(["naive", "sdpa"]))
    assert list(checked.attends) == list(checked.outputs) == ["naive", "sdpa"]
    assert [one.variant for one in checked.contenders("fwd")] == ["naive", "sdpa"]
    assert [one.variant for one in checked.contenders("fwd", ["sdpa"])] == ["sdpa"]


def test_a_wrong_variant_is_an_error_before_any_timing() -> None:
    naive = usable_variants(["naive"])
    check(CASE, [*naive, wrong_by(0.0)])
    with pytest.raises(AssertionError, match="wrong, causal: o"):
        check(CASE, [*naive, wrong_by(1e-4)])


def test_a_wrong_bias_gradient_is_an_error() -> None:
    bias = torch.randn(1, 2, 16, 16, requires_grad=True)
    case = replace(CASE, bias=bias)
    (naive,) = usable_variants(["naive"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        doubled = 2.0 * bias - bias.detach()
        return naive.attend_for(replace(case, bias=doubled))(q, k, v)

    with pytest.raises(AssertionError, match="wrong, causal: dbias"):
        check(case, [naive, Variant("wrong", "wrong", lambda _case: attend)])


def test_given_expected_outputs_are_compared_with() -> None:
    expected = check(CASE, usable_variants(["naive"])).expected
    sdpa = usable_variants(["sdpa"])
    assert list(check(CASE, sdpa, expected).outputs) == ["sdpa"]
    other = Expected(*(of._replace(dv=of.dv + 1.0) for of in (expected.exact, expected.naive)))
    with pytest.raises(AssertionError, match="sdpa, causal: dv"):
        check(CASE, sdpa, other)


@pytest.mark.quick
def test_contenders_are_interleaved_and_each_has_its_row() -> None:
    calls = []

    def contender(variant: str, **more: int) -> Contender:
        def workload() -> None:
            calls.append(variant)

        return Contender(CASE, "fwd", variant, lambda: workload, 0.5, **more)

    measured = measure_contenders(
        [contender("cpu"), contender("one", threads=1), contender("naive", most_rounds=1)],
        provenance=PROVENANCE,
        suite="cpu",
        budget=Budget(0.0, fewest=2),
    )
    assert calls[-5:] == ["cpu", "one", "naive", "one", "cpu"], "after the warm-up"
    assert [len(one.laps) for one in measured] == [2, 2, 1]
    rows = [one.row for one in measured]
    assert [(row.variant, row.threads, row.error, row.suite) for row in rows] == [
        ("cpu", 2, 0.5, "cpu"),
        ("one", 1, 0.5, "cpu"),
        ("naive", 2, 0.5, "cpu"),
    ]


PADDED = Case(
    name="padding", B=2, H_q=3, H_kv=3, M=16, N=16, D=8, D_v=8, dtype=torch.bfloat16,
    mask=Mask.padding(torch.tensor([5, 16])),
)  # fmt: skip


def refuse(_case: Case) -> Attend:
    raise ValueError("takes no padding")


def fail(_case: Case) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    return attend


def err(case: Case) -> Attend:
    (right,) = usable_variants(["sdpa"])
    attend = right.attend_for(case)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = attend(q, k, v)
        return o + torch.tensor([0.0, 0.0, 0.5])[:, None, None]  # in one of the checked heads

    return call


def test_correct_variants_are_kept_and_only_some_heads_are_checked() -> None:
    trial = try_out(PADDED, usable_variants(["naive", "sdpa", "cpu"]))
    assert trial.skipped == {}
    assert list(trial.checked.attends) == list(trial.seconds) == ["naive", "sdpa", "cpu"]
    assert trial.checked.outputs["cpu"].dq.shape == (2, 2, 16, 8)
    assert trial.checked.inputs.q.shape == (2, 3, 16, 8)
    for contender in trial.checked.contenders("bwd"):
        assert 0.0 < contender.error < 0.1


@pytest.mark.parametrize(
    ("attend_for", "reason"),
    [(refuse, "takes no padding"), (fail, "no kernel"), (err, "wrong, padding: o")],
)
@pytest.mark.parametrize("is_peer", [True, False])
def test_a_failing_variant_is_named_and_the_others_are_measured(
    attend_for: Callable[[Case], Attend], reason: str, is_peer: bool
) -> None:
    wrong = Variant("wrong", "wrong", attend_for, is_peer=is_peer)
    trial = try_out(PADDED, [wrong, *usable_variants(["sdpa"])])
    assert list(trial.checked.attends) == ["sdpa"]
    named, others = (trial.skipped, trial.broken) if is_peer else (trial.broken, trial.skipped)
    assert reason in named["wrong"]
    assert others == {}


def test_a_lost_device_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLostError, match=r"lost to this process: .* encountered$"):
        check_device()


def test_a_reason_has_only_the_first_lines_that_matter() -> None:
    def attempt() -> None:
        for text in (
            "Flash attention kernel not used because: (Triggered internally at a.cpp:1.)",
            "It takes no attn_mask. (Triggered internally at b.cpp:2.)",
            "CuDNN attention has been runtime disabled. (Triggered internally at c.cpp:3.)",
        ):
            warnings.warn(text, stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.\nException raised from ...")

    assert (
        failure_reason(attempt)
        == "No available kernel. Aborting execution.; It takes no attn_mask."
    )
    assert failure_reason(lambda: None) is None


def test_heads_that_share_the_first_and_the_last_key_head_are_checked() -> None:
    (sdpa,) = usable_variants(["sdpa"])

    def wrong_in(head: int) -> Variant:
        def attend_for(case: Case) -> Attend:
            attend = sdpa.attend_for(case)
            error = torch.zeros(6, 1, 1)
            error[head] = 0.5
            return lambda q, k, v: attend(q, k, v) + error

        return Variant("wrong", "wrong", attend_for)

    case = replace(PADDED, H_q=6, H_kv=3)
    assert [h for h in range(6) if try_out(case, [wrong_in(h)]).skipped] == [0, 1, 4, 5]
    for H_q, H_kv, checked in ((6, 3, (4, 2)), (2, 1, (2, 1))):
        trial = try_out(replace(PADDED, H_q=H_q, H_kv=H_kv), [sdpa])
        outputs = trial.checked.outputs["sdpa"]
        assert (outputs.dq.shape[1], outputs.dk.shape[1]) == checked
