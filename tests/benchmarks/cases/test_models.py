from __future__ import annotations

from benchmarks.cases.models import MODELS, call_id, model_calls


def test_masks_fit_their_shapes_and_every_query_sees_a_key() -> None:
    for call in model_calls():
        small = call.checked_case()
        if small.mask is not None:
            seen = small.mask.materialize(small.B, 1, small.M, small.N)
            assert seen.any(dim=-1).all(), call.name


def test_every_model_has_calls_in_both_dtypes_with_names_of_their_own() -> None:
    names = [call_id(call) for call in model_calls()]
    assert len(set(names)) == len(names) == 2 * len(MODELS)
