from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cases.attention import case_id
from benchmarks.cases.gpu import (
    TOKENS,
    WIDTH,
    ceiling_cases,
    decode_cases,
    grid_cases,
    linear_cases,
    masked_cases,
)
from benchmarks.goals.gpu import GPU_GOALS
from benchmarks.runner.caches import cache_attends
from tests.bench.example import row
from tests.support.tiers import each
from transformer_kernels.bench import Case, Direction, Row

SMALL = 1024
"""A length at which masks can be materialized."""


@each("case", [*grid_cases(), *masked_cases()], ids=case_id)
def test_every_case_has_the_same_tokens_and_width(case: Case) -> None:
    assert case.B * case.M == TOKENS
    assert case.M == case.N
    assert case.H_q * case.D_v == case.H_kv * case.D_v == WIDTH


def test_the_grid_is_complete_and_its_names_are_unique() -> None:
    cases = grid_cases()
    assert len({(case_id(case), case.D) for case in cases}) == len(cases)
    grid = {(case.name, case.M, case.D) for case in cases if case.dtype_name == "bfloat16"}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    assert grid >= {(n, S, D) for n in ("full", "causal") for S in lengths for D in (64, 128)}
    assert {case.dtype_name for case in cases} == {"bfloat16", "float16", "float32"}


def test_the_first_cases_are_long_and_cover_both_masks_and_widths() -> None:
    first = grid_cases()[:8]
    assert {case.M for case in first} == {4096, 16384}
    assert {(case.name, case.D) for case in first} == {
        (name, D) for name in ("full", "causal") for D in (64, 128)
    }


def test_visible_fractions_match_the_names_and_every_query_sees_a_key() -> None:
    cases = masked_cases(SMALL)
    fractions = [case.visible for case in cases]
    assert fractions == pytest.approx([1.0, 0.5, 0.125, 0.25, 0.5], abs=0.01)
    for case in cases:
        if case.mask is not None:
            assert case.mask.materialize(case.B, 1, SMALL, SMALL).any(dim=-1).all()


def test_ceilings_have_the_operations_and_bytes_of_their_workload() -> None:
    matmul, copy = ceiling_cases()
    assert matmul.operations("fwd") == 2 * 8192**3
    assert copy.traffic("fwd") == 2 * (2 * copy.D) * copy.dtype.itemsize


def rows_of(case: Case, direction: Direction) -> list[Row]:
    shape = replace(case, mask=None)  # the visible fraction takes seconds to compute
    made = replace(row(case=shape), suite="gpu", direction=direction)
    kernels = ("cuda_sm80", "cuda_sm90", "triton")
    variants = ("naive", "sdpa_flash", "sdpa_cudnn", "flex", "fla", *kernels)
    return [replace(made, variant=variant) for variant in variants]


def test_every_goal_finds_its_rows_in_the_suite() -> None:
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    rows = [
        one
        for case in [*grid_cases(), *masked_cases(), *linear_cases()]
        for direction in directions
        for one in rows_of(case, direction)
    ]
    for case in decode_cases():
        small = torch.zeros(case.B, 1, 64, 1)
        for name in cache_attends(small, small, "cpu"):
            ours = replace(row(case=replace(case, name=name)), suite="gpu", variant="cuda_sm80")
            rows += [ours, replace(ours, variant="copy")]
    found = [len(goal.figures(rows)) for goal in GPU_GOALS]
    against_cudnn, speeds = [10], [1] * 6
    hopper = against_cudnn + speeds + against_cudnn + speeds[:4]
    linear = [len(linear_cases()) // 2] * 2
    assert found == [24] * 7 + hopper + [1] * 18 + linear + [1] * 3
