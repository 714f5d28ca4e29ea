from __future__ import annotations

import pytest
from torch import Tensor

from benchmarks.measure import check
from transformer_kernels.bench import Case, Variant, usable_variants
from transformer_kernels.mask import Mask

CASE = Case(name="causal", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8, mask=Mask.causal())


def wrong_by(relative: float) -> Variant:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = right(q, k, v) * (1.0 + relative)
        return o

    (naive,) = usable_variants(["naive"])
    right = naive.bind(CASE)
    return Variant("wrong", "wrong", lambda _case: attend)


def test_right_variants_pass_and_keep_their_outputs() -> None:
    checked = check(CASE, usable_variants(["naive", "sdpa"]))
    assert list(checked.attends) == list(checked.outputs) == ["naive", "sdpa"]


def test_a_wrong_variant_stops_before_any_time_is_taken() -> None:
    naive = usable_variants(["naive"])
    check(CASE, [*naive, wrong_by(0.0)])
    with pytest.raises(AssertionError, match="wrong, causal: o"):
        check(CASE, [*naive, wrong_by(1e-4)])
