"""The fact table: the hard and the soft way, and where gradients go."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from transformer_kernels import Mask
from transformer_kernels.models import FactTable, FactTableConfig, fact_table
from transformer_kernels.nn import AttnImplementation

SMALL = FactTableConfig(rows=7, width=5, value_width=3)
PATHS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def table(
    config: FactTableConfig = SMALL, attn_implementation: AttnImplementation = "fused"
) -> FactTable:
    torch.manual_seed(0)
    return FactTable(config, attn_implementation=attn_implementation).double()


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def shown(*shape: int) -> Tensor:
    """Two thirds of the pairs, and none of the second query's."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 2 / 3
    mask[..., 1, :] = False
    return mask


def by_hand(facts: FactTable, queries: Tensor, mask: Tensor | None) -> Tensor:
    s = queries @ facts.keys.T
    if facts.config.scaled:
        s = s / math.sqrt(facts.config.width)
    weights = s.exp() if mask is None else s.exp() * mask
    p = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    return p @ facts.values


def assert_same(actual: object, expected: object) -> None:
    """To rounding, in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


WIDTHS = [(1, 1, 1), (7, 5, 3), (6, 4, 6), (8, 8, 8), (3, 2, 9), (13, 600, 2), (2, 3, 601)]


@pytest.mark.parametrize(("rows", "width", "value_width"), WIDTHS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_the_soft_way_is_a_weighted_mean(
    path: AttnImplementation, scaled: bool, rows: int, width: int, value_width: int
) -> None:
    config = FactTableConfig(rows=rows, width=width, value_width=value_width, scaled=scaled)
    facts = table(config, path)
    queries = randn(2, 4, width).requires_grad_()
    do = randn(2, 4, value_width, seed=3)
    for mask in (None, shown(4, rows), shown(2, 1, 4, rows)):
        o = facts.soft(queries, None if mask is None else Mask.dense(mask))
        dense = mask[:, 0] if mask is not None and mask.dim() == 4 else mask
        expected = by_hand(facts, queries, dense)
        assert_same(o, expected)
        inputs = [queries, facts.keys, facts.values]
        gradients = torch.autograd.grad(o, inputs, do)
        assert_same(gradients, torch.autograd.grad(expected, inputs, do))
        assert_same(facts(queries, None if mask is None else Mask.dense(mask)), o)


@pytest.mark.parametrize("path", PATHS)
def test_it_takes_the_path(path: AttnImplementation, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        paths.append(options["attn_implementation"])
        return v

    monkeypatch.setattr(fact_table, "attend", record)
    table(attn_implementation=path).soft(randn(4, 5))
    assert paths == [path]


@pytest.mark.parametrize(("rows", "width", "value_width"), WIDTHS)
def test_the_hard_way_takes_the_value_of_the_most_similar_key(
    rows: int, width: int, value_width: int
) -> None:
    facts = table(FactTableConfig(rows=rows, width=width, value_width=value_width))
    queries = randn(2, 4, width)
    values = facts.hard(queries)
    for b in range(2):
        for i in range(4):
            similarities = [(key @ queries[b, i]).item() for key in facts.keys]
            row = similarities.index(max(similarities))
            assert_same(values[b, i], facts.values[row])


def test_of_equal_keys_it_takes_the_first() -> None:
    facts = table()
    with torch.no_grad():
        facts.keys[:] = facts.keys[0].clone()
    assert_same(facts.hard(randn(4, 5)), facts.values[:1].expand(4, 3))


@pytest.mark.parametrize("path", PATHS)
def test_002_gradients_reach_the_keys_in_the_soft_form_and_not_in_the_hard(
    path: AttnImplementation,
) -> None:
    facts = table(attn_implementation=path)
    queries = randn(4, 5).requires_grad_()
    inputs = [facts.keys, queries, facts.values]
    soft = torch.autograd.grad(facts.soft(queries).sum(), inputs)
    assert all(gradient.any(dim=-1).all() for gradient in soft)

    hard = torch.autograd.grad(facts.hard(queries).sum(), inputs, allow_unused=True)
    assert [gradient is None for gradient in hard] == [True, True, False]
    row = (queries @ facts.keys.T).argmax(dim=-1)
    assert_same(hard[2], torch.bincount(row, minlength=7).double()[:, None].expand(7, 3))


def test_002_keys_and_values_are_parameters() -> None:
    """They were tensors beside the module: not trained, not saved, not moved."""
    facts = table()
    assert {name: tuple(p.shape) for name, p in facts.named_parameters()} == {
        "keys": (7, 5),
        "values": (7, 3),
    }
    assert facts.keys.dtype == torch.float64


@pytest.mark.parametrize("path", PATHS)
def test_002_a_table_whose_values_are_as_wide_as_it_has_rows(path: AttnImplementation) -> None:
    """(values * weights).sum(0) weights columns where there are as many of them as rows."""
    facts = table(replace(SMALL, value_width=7), path)
    query = randn(1, 5)
    weights = (facts.keys @ query[0]).softmax(dim=0)
    theirs = (facts.values * weights).sum(dim=0)
    assert theirs.shape == (7,)
    assert_same(facts.soft(query)[0], (facts.values * weights[:, None]).sum(dim=0))
    assert not torch.isclose(facts.soft(query)[0], theirs).any()


@pytest.mark.parametrize("path", PATHS)
def test_002_a_hidden_pair_is_hidden_from_that_query_alone(path: AttnImplementation) -> None:
    """`similarities[4, 7] -= inf`: query 4 takes nothing from row 7, and every other query does."""
    facts = table(replace(SMALL, rows=9), path)
    queries = randn(6, 5)
    pairs = torch.ones(6, 9, dtype=torch.bool)
    pairs[4, 7] = False
    before = facts.soft(queries, Mask.dense(pairs))
    with torch.no_grad():
        facts.keys[7] += 1.0
        facts.values[7] += 1.0
    after = facts.soft(queries, Mask.dense(pairs))
    assert_same(after[4], before[4])
    others = [0, 1, 2, 3, 5]
    assert (after[others] != before[others]).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_query_that_sees_no_row_gets_nothing_and_gives_none(path: AttnImplementation) -> None:
    facts = table(attn_implementation=path)
    queries = randn(4, 5).requires_grad_()
    o = facts.soft(queries, Mask.dense(shown(4, 7)))
    assert o[1].tolist() == [0.0] * 3
    gradients = torch.autograd.grad(o.sum(), [queries, facts.keys, facts.values])
    assert gradients[0][1].tolist() == [0.0] * 5
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("path", PATHS)
def test_the_soft_way_becomes_the_hard_one_as_queries_grow(path: AttnImplementation) -> None:
    facts = table(attn_implementation=path)
    queries = randn(2, 4, 5)
    torch.testing.assert_close(facts.soft(1e4 * queries), facts.hard(queries))
    assert not torch.allclose(facts.soft(queries), facts.hard(queries))


@pytest.mark.parametrize("path", PATHS)
def test_no_batch_and_no_queries(path: AttnImplementation) -> None:
    facts = table(attn_implementation=path)
    queries = randn(3, 4, 5)
    assert_same(facts.soft(queries[1]), facts.soft(queries)[1])
    assert_same(facts.hard(queries[1]), facts.hard(queries)[1])
    assert facts.soft(queries[:, :0]).shape == (3, 0, 3)
    assert facts.hard(queries[:0]).shape == (0, 4, 3)


def test_keys_learn_in_the_soft_way() -> None:
    """Three questions, three answers: the table learns which key is whose."""
    facts = table(FactTableConfig(rows=3, width=4, value_width=3)).float()
    with torch.no_grad():
        facts.values.copy_(torch.eye(3))
    queries, answers = randn(3, 4).float(), torch.eye(3)
    optimizer = torch.optim.Adam([facts.keys], lr=0.1)
    for _ in range(60):
        loss = nn.functional.mse_loss(facts.soft(queries), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(facts.hard(queries), answers)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 2, 4, 5), (4, 0)])
def test_wrong_queries_are_named(shape: tuple[int, ...]) -> None:
    message = f"queries must be (B, M, 5) or (M, 5), got shape {shape}"
    for way in (table().hard, table().soft):
        with pytest.raises(ValueError, match=re.escape(message)):
            way(randn(*shape))


@pytest.mark.parametrize("path", PATHS)
def test_002_a_mask_larger_than_the_table_is_refused(path: AttnImplementation) -> None:
    mask = Mask.dense(torch.ones(4, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 1, 4, 7\), got \(1, 1, 4, 8\)"):
        table(attn_implementation=path).soft(randn(4, 5), mask)


@pytest.mark.parametrize("name", ["rows", "width", "value_width"])
def test_wrong_configs_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
        replace(SMALL, **{name: 0})  # type: ignore[arg-type]


def test_an_unknown_path_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"attn_implementation must be one of 'eager'.*got 'flash'"
    ):
        FactTable(SMALL, attn_implementation="flash")  # type: ignore[arg-type]
