"""Fact table: hard and soft lookup, their gradients, and question answering."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import each
from transformer_kernels import Mask
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.models import FactTable, FactTableConfig, Lookup, LookupConfig, lookup
from transformer_kernels.nn import AttnImplementation

SMALL = FactTableConfig(rows=7, width=5, value_width=3)
IMPLEMENTATIONS: tuple[AttnImplementation, ...] = get_args(AttnImplementation)


def table(
    config: FactTableConfig = SMALL, attn_implementation: AttnImplementation = "fused"
) -> FactTable:
    torch.manual_seed(0)
    return FactTable(config, attn_implementation=attn_implementation).double()


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def random_mask(*shape: int) -> Tensor:
    """A random mask with about two thirds of the pairs; the second query is fully masked."""
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


WIDTHS = [(1, 1, 1), (7, 5, 3), (6, 4, 6), (8, 8, 8), (3, 2, 9), (13, 600, 2), (2, 3, 601)]


@pytest.mark.parametrize(("rows", "width", "value_width"), WIDTHS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_lookup_is_a_weighted_mean(
    implementation: AttnImplementation, scaled: bool, rows: int, width: int, value_width: int
) -> None:
    config = FactTableConfig(rows=rows, width=width, value_width=value_width, scaled=scaled)
    facts = table(config, implementation)
    queries = randn(2, 4, width).requires_grad_()
    do = randn(2, 4, value_width, seed=3)
    for mask in (None, random_mask(4, rows), random_mask(2, 1, 4, rows)):
        o = facts.soft(queries, None if mask is None else Mask.dense(mask))
        dense = mask[:, 0] if mask is not None and mask.dim() == 4 else mask
        expected = by_hand(facts, queries, dense)
        assert_same_function(o, expected)
        inputs = [queries, facts.keys, facts.values]
        gradients = torch.autograd.grad(o, inputs, do)
        assert_same_function(gradients, torch.autograd.grad(expected, inputs, do))
        assert_same_function(facts(queries, None if mask is None else Mask.dense(mask)), o)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_soft_lookup_uses_the_selected_implementation(
    implementation: AttnImplementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementations = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        implementations.append(options["attn_implementation"])
        return v

    monkeypatch.setattr(lookup, "attend", record)
    table(attn_implementation=implementation).soft(randn(4, 5))
    assert implementations == [implementation]


@each(("rows", "width", "value_width"), WIDTHS)
def test_hard_lookup_returns_the_value_of_the_most_similar_key(
    rows: int, width: int, value_width: int
) -> None:
    facts = table(FactTableConfig(rows=rows, width=width, value_width=value_width))
    queries = randn(2, 4, width)
    values = facts.hard(queries)
    for b in range(2):
        for i in range(4):
            similarities = [(key @ queries[b, i]).item() for key in facts.keys]
            row = similarities.index(max(similarities))
            assert_same_function(values[b, i], facts.values[row])


def test_hard_lookup_resolves_ties_to_the_first_key() -> None:
    facts = table()
    with torch.no_grad():
        facts.keys[:] = facts.keys[0].clone()
    assert_same_function(facts.hard(randn(4, 5)), facts.values[:1].expand(4, 3))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_get_gradients_from_soft_but_not_from_hard_lookup(
    implementation: AttnImplementation,
) -> None:
    facts = table(attn_implementation=implementation)
    queries = randn(4, 5).requires_grad_()
    inputs = [facts.keys, queries, facts.values]
    soft = torch.autograd.grad(facts.soft(queries).sum(), inputs)
    assert all(gradient.any(dim=-1).all() for gradient in soft)

    hard = torch.autograd.grad(facts.hard(queries).sum(), inputs, allow_unused=True)
    assert [gradient is None for gradient in hard] == [True, True, False]
    row = (queries @ facts.keys.T).argmax(dim=-1)
    assert_same_function(hard[2], torch.bincount(row, minlength=7).double()[:, None].expand(7, 3))


def test_keys_and_values_are_parameters() -> None:
    """Plain tensor attributes would not be trained, saved or moved with the module."""
    facts = table()
    assert {name: tuple(p.shape) for name, p in facts.named_parameters()} == {
        "keys": (7, 5),
        "values": (7, 3),
    }
    assert facts.keys.dtype == torch.float64


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_as_wide_as_the_table_has_rows(implementation: AttnImplementation) -> None:
    """(values * weights).sum(0) would weight columns if there are as many columns as rows."""
    facts = table(replace(SMALL, value_width=7), implementation)
    query = randn(1, 5)
    weights = (facts.keys @ query[0]).softmax(dim=0)
    wrong = (facts.values * weights).sum(dim=0)
    assert wrong.shape == (7,)
    assert_same_function(facts.soft(query)[0], (facts.values * weights[:, None]).sum(dim=0))
    assert not torch.isclose(facts.soft(query)[0], wrong).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_hidden_pair_affects_one_query_only(implementation: AttnImplementation) -> None:
    """With row 7 hidden from query 4, a change of row 7 affects every query except 4."""
    facts = table(replace(SMALL, rows=9), implementation)
    queries = randn(6, 5)
    pairs = torch.ones(6, 9, dtype=torch.bool)
    pairs[4, 7] = False
    before = facts.soft(queries, Mask.dense(pairs))
    with torch.no_grad():
        facts.keys[7] += 1.0
        facts.values[7] += 1.0
    after = facts.soft(queries, Mask.dense(pairs))
    assert_same_function(after[4], before[4])
    others = [0, 1, 2, 3, 5]
    assert (after[others] != before[others]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fully_masked_query_gets_0_and_zero_gradients(implementation: AttnImplementation) -> None:
    facts = table(attn_implementation=implementation)
    queries = randn(4, 5).requires_grad_()
    o = facts.soft(queries, Mask.dense(random_mask(4, 7)))
    assert o[1].tolist() == [0.0] * 3
    gradients = torch.autograd.grad(o.sum(), [queries, facts.keys, facts.values])
    assert gradients[0][1].tolist() == [0.0] * 5
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unbatched_and_empty_queries(implementation: AttnImplementation) -> None:
    facts = table(attn_implementation=implementation)
    queries = randn(3, 4, 5)
    assert_same_function(facts.soft(queries[1]), facts.soft(queries)[1])
    assert_same_function(facts.hard(queries[1]), facts.hard(queries)[1])
    assert facts.soft(queries[:, :0]).shape == (3, 0, 3)
    assert facts.hard(queries[:0]).shape == (0, 4, 3)


def test_keys_learn_by_soft_lookup() -> None:
    """Trained on three queries and their answers, hard lookup gives the right answers."""
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
def test_queries_of_a_wrong_shape_raise_value_error(shape: tuple[int, ...]) -> None:
    message = f"queries must be (B, M, 5) or (M, 5), got shape {shape}"
    for look_up in (table().hard, table().soft):
        with pytest.raises(ValueError, match=re.escape(message)):
            look_up(randn(*shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mask_larger_than_the_table_raises_value_error(implementation: AttnImplementation) -> None:
    mask = Mask.dense(torch.ones(4, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 1, 4, 7\), got \(1, 1, 4, 8\)"):
        table(attn_implementation=implementation).soft(randn(4, 5), mask)


def test_answer_is_the_row_of_the_key_nearest_to_the_mean_word() -> None:
    model = Lookup(LookupConfig(vocabulary=11, rows=7, width=5)).double()
    nn.init.normal_(model.embedding.weight)
    words, lengths = torch.tensor([[3, 4, 1], [5, 9, 10]]), torch.tensor([3, 2])
    query = torch.stack(
        [model.embedding(words[0]).mean(dim=0), model.embedding(words[1, :2]).mean(0)]
    )
    similarities = query @ model.table.keys.T
    assert torch.equal(model.answer(words, lengths), similarities.argmax(dim=1))
    assert_same_function(model(words, lengths), similarities.log_softmax(dim=1))
