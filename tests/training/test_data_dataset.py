"""Tests that apply to every dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from transformer_kernels.training.data import (
    ByteWindows,
    Dataset,
    MaskedSentences,
    Tokens,
    TokenWindows,
    corpus_from_bytes,
    label_texts,
    load_pairs,
    load_reviews,
    pair_texts,
)
from transformer_kernels.training.data.dataset import RaggedTokens, digest_of, evenly_spaced

CORPUS = corpus_from_bytes(b"".join(b"line %d of the text\n" % i for i in range(400)), "lines")
BYTES = Tokens(special=True)
PAIRS = [(f"in {i}", f"out {i * i}") for i in range(300)]

MAKERS: dict[str, Callable[[int], Dataset]] = {
    "bytes": lambda size: ByteWindows(CORPUS, size),
    "tokens": lambda size: TokenWindows(CORPUS, BYTES, size),
    "masked": lambda size: MaskedSentences(CORPUS, BYTES, size),
    "labelled": lambda size: label_texts(
        [[b"a" * (i % 50 + 1) for i in range(60)], [b"b" * (i + 1) for i in range(9)]],
        [[b"A" * (i + 1) for i in range(40)], [b"B" * (i % 30 + 1) for i in range(50)]],
        classes=("a", "b"),
        tokens=Tokens(),
        longest=size,
        name="letters",
    ),
    "pairs": lambda size: pair_texts(
        PAIRS[:200], PAIRS[200:], tokens=BYTES, longest=size, name="squares"
    ),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Dataset]:
    return MAKERS[request.param]


def test_batches_are_int64_on_the_cpu(make: Callable[[int], Dataset]) -> None:
    dataset = make(20)
    for batch in (dataset.draw(7, torch.Generator()), dataset.held_out(7)):
        for name, values in batch.items():
            assert values.dtype == torch.int64, name
            assert values.device.type == "cpu", name
            assert len(values) == 7, name


def test_rows_are_zero_padded_to_the_longest(make: Callable[[int], Dataset]) -> None:
    dataset = make(20)
    for batch in (dataset.draw(7, torch.Generator()), dataset.held_out(7)):
        for name, lengths in batch.items():
            if not name.endswith("lengths"):
                continue
            rows = batch["tokens" if name == "lengths" else name.removesuffix("_lengths")]
            assert rows.shape[1] == lengths.max() <= 20
            assert lengths.min() >= 1
            padding = torch.arange(rows.shape[1]) >= lengths[:, None]
            assert (rows[padding] == 0).all()


def test_generator_state_determines_the_draw(make: Callable[[int], Dataset]) -> None:
    dataset = make(20)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, second = dataset.draw(8, generator), dataset.draw(8, generator)
    generator.set_state(state)
    torch.manual_seed(99)
    again = make(20).draw(8, generator)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_held_out_examples_are_the_same_at_every_call(make: Callable[[int], Dataset]) -> None:
    dataset = make(20)
    first = dataset.held_out(9)
    dataset.draw(3, torch.Generator())
    torch.manual_seed(99)
    for other in (dataset, make(20)):
        again = other.held_out(9)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_held_out_returns_fewer_examples_if_there_are_no_more(
    make: Callable[[int], Dataset],
) -> None:
    batch = make(20).held_out(10_000)
    assert 39 <= len(next(iter(batch.values()))) < 1000


def test_torch_global_generator_is_not_used(make: Callable[[int], Dataset]) -> None:
    state = torch.get_rng_state()
    dataset = make(20)
    dataset.draw(3, torch.Generator())
    dataset.held_out(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_digest_identifies_the_data_and_its_settings(make: Callable[[int], Dataset]) -> None:
    assert make(20).digest == make(20).digest
    assert make(20).digest != make(21).digest
    assert len(make(20).digest) == 64
    int(make(20).digest, 16)


def test_digest_depends_on_the_content() -> None:
    other = corpus_from_bytes(bytes(5000), "lines")
    assert ByteWindows(other, 9).digest != ByteWindows(CORPUS, 9).digest
    assert TokenWindows(CORPUS, Tokens(), 9).digest != TokenWindows(CORPUS, BYTES, 9).digest
    one, two, three = (
        pair_texts(train, [("c", "d")], tokens=BYTES, longest=9, name="").digest
        for train in ([("a", "b")], [("b", "a")], [("a", "c")])
    )
    assert len({one, two, three}) == 3
    texts = [[[b"ab", b"c"], [b"d"]], [[b"a", b"bc"], [b"d"]], [[b"ab"], [b"c", b"d"]]]
    digests = {
        label_texts(
            text, [[b"e"], [b"f"]], classes=("x", "y"), tokens=Tokens(), longest=9, name=""
        ).digest
        for text in texts
    }
    assert len(digests) == 3


def test_source_is_the_absolute_path_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for class_folder in ("train/neg", "train/pos", "test/neg", "test/pos"):
        (tmp_path / "films" / class_folder).mkdir(parents=True)
        (tmp_path / "films" / class_folder / "0_1.txt").write_text("seen")
    assert load_reviews("films").source == str(tmp_path / "films")
    for name in ("train.de", "train.en", "val.de", "val.en"):
        (tmp_path / "films" / name).write_text("x\n")
    assert load_pairs("films", tokens=BYTES).source == str(tmp_path / "films")
    assert MAKERS["pairs"](20).source is None


def test_digest_depends_on_part_boundaries_and_types() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("1") != digest_of(1) != digest_of(b"1")


def test_evenly_spaced_includes_both_ends() -> None:
    assert evenly_spaced(10, 4).tolist() == [0, 3, 6, 9]
    assert evenly_spaced(3, 9).tolist() == [0, 1, 2]
    assert evenly_spaced(5, 1).tolist() == [0]


def rows(*lengths: int, largest: int = 9) -> list[torch.Tensor]:
    return [torch.randint(1, largest + 1, (length,)) for length in lengths]


def test_rows_round_trip() -> None:
    given = rows(3, 0, 5, 1)
    ragged = RaggedTokens.of(given)
    assert len(ragged) == 4
    for number, row in enumerate(given):
        assert torch.equal(ragged[number], row)


def test_rows_are_gathered_in_the_given_order_and_padded() -> None:
    given = rows(3, 0, 5, 1)
    tokens, lengths = RaggedTokens.of(given).padded(torch.tensor([3, 0, 1, 3]))
    assert lengths.tolist() == [1, 3, 0, 1]
    assert tokens.shape == (4, 3)
    assert tokens[1].tolist() == given[0].tolist()
    assert tokens[0].tolist() == tokens[3].tolist() == [int(given[3]), 0, 0]
    assert tokens[2].tolist() == [0, 0, 0]


def test_empty_row_indices_give_an_empty_batch() -> None:
    tokens, lengths = RaggedTokens.of(rows(2)).padded(torch.empty(0, dtype=torch.int64))
    assert tokens.shape == (0, 0)
    assert lengths.shape == (0,)


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, torch.uint8), (256, torch.int16), (32_767, torch.int16), (32_768, torch.int32)],
)
def test_values_have_the_narrowest_dtype(largest: int, dtype: torch.dtype) -> None:
    ragged = RaggedTokens.of([torch.tensor([largest, 0]), torch.tensor([1])])
    assert ragged.values.dtype == dtype
    assert ragged[0].tolist() == [largest, 0]
