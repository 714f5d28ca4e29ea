"""Checks of all variants of a case, on the CPU: `try_out` does not depend on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from transformer_kernels.bench import Attend, Case, Variant, usable_variants
from transformer_kernels.bench.trial import DeviceLostError, check_device, failure_reason, try_out
from transformer_kernels.masks.mask import Mask

CASE = Case(
    name="padding", B=2, H_q=3, H_kv=3, M=16, N=16, D=8, D_v=8, dtype=torch.bfloat16,
    mask=Mask.padding(torch.tensor([5, 16])),
)  # fmt: skip


def variant(name: str, attend_for: Callable[[Case], Attend], *, is_peer: bool) -> Variant:
    return Variant(name, name, attend_for, is_peer=is_peer)


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
    trial = try_out(CASE, usable_variants(["naive", "sdpa", "cpu"]))
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
    wrong = variant("wrong", attend_for, is_peer=is_peer)
    trial = try_out(CASE, [wrong, *usable_variants(["sdpa"])])
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

        return variant("wrong", attend_for, is_peer=True)

    case = replace(CASE, H_q=6, H_kv=3)
    assert [h for h in range(6) if try_out(case, [wrong_in(h)]).skipped] == [0, 1, 4, 5]
    for H_q, H_kv, checked in ((6, 3, (4, 2)), (2, 1, (2, 1))):
        trial = try_out(replace(CASE, H_q=H_q, H_kv=H_kv), [sdpa])
        outputs = trial.checked.outputs["sdpa"]
        assert (outputs.dq.shape[1], outputs.dk.shape[1]) == checked
