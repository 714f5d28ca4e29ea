"""The division of documents, in one process."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from tests.support.tiers import each
from transformer_kernels.distributed.documents import DocumentShard


def shards_of(lengths: list[int], size: int, trailing: int = 0) -> list[DocumentShard]:
    cu_seqlens = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    tokens = -(-(sum(lengths) + trailing) // size)
    return [DocumentShard.of(cu_seqlens, tokens, rank, size) for rank in range(size)]


SIZES = (1, 2, 3, 4, 7)
LENGTHS = {
    "none": [],
    "empty": [0, 0],
    "one": [1],
    "mixed": [0, 1, 2, 5, 0, 0, 17, 64, 100, 333, 1, 1, 3, 0],
    "ones": [1] * 30,
    "in-turns": [1, 3] * 20,
    "short": [random.Random(0).randint(1, 50) for _ in range(300)],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("trailing", [0, 10])
@pytest.mark.parametrize("name", LENGTHS)
def test_ranks_have_every_token_once_in_order(name: str, trailing: int, size: int) -> None:
    lengths = LENGTHS[name]
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    position = [i for length in lengths for i in range(length)]
    shards = shards_of(lengths, size, trailing)
    counts = []
    for shard in shards:
        rows = [n for n in shard.index.tolist() if n >= 0]
        counts.append(len(rows))
        assert rows == sorted(rows)
        padding = [-1] * (len(shard.index) - len(rows))
        assert shard.index.tolist() == rows + padding
        assert shard.document.tolist() == [document[n] for n in rows] + padding
        assert shard.position.tolist() == [position[n] for n in rows] + padding
    assert max(counts) - min(counts) <= 1
    index = torch.cat([shard.index for shard in shards])
    assert index[index >= 0].sort().values.tolist() == list(range(sum(lengths)))


@each("size", SIZES)
def test_ranks_have_chunks_from_both_ends(size: int) -> None:
    """Chunks c and 2 P - 1 - c of a document have the same rank, and lengths of chunks differ by at
    most one."""
    lengths = [2 * size, 3 * size + 1, 100, 333]
    shards = shards_of(lengths, size)
    for d, length in enumerate(lengths):
        owner = torch.full((length,), -1)
        for rank, shard in enumerate(shards):
            owner[shard.position[shard.document == d]] = rank
        ranks = owner.unique_consecutive().tolist()
        assert ranks == ranks[::-1]
        assert sorted({*ranks}) == list(range(size))
        # The two chunks of the last pair are neighbours.
        runs = owner.unique_consecutive(return_counts=True)[1].tolist()
        middle = runs.pop(size - 1)
        chunks = [*runs, middle // 2, -(-middle // 2)]
        assert max(chunks) - min(chunks) <= 1


@each("size", SIZES)
def test_ranks_have_the_same_causal_work(size: int) -> None:
    """Visible pairs differ by less than 3% if documents are long against the chunks."""
    generator = random.Random(size)
    for count in (1, 3, 20):
        lengths = [generator.randint(100 * size, 3000) for _ in range(count)]
        shards = shards_of(lengths, size)
        pairs = [int((shard.position + 1).sum()) for shard in shards]
        assert max(pairs) - min(pairs) < 0.03 * max(pairs)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("lengths", "bound"),
    [
        (LENGTHS["short"], 1.05),
        ([1] * 240, 1.0),
        ([2] * 240, 1.35),
        ([17] * 160, 1.05),
        ([50] * 160, 1.05),
        (LENGTHS["in-turns"] * 4, 1.2),
        ([3, 1] * 80, 1.2),
    ],
    ids=["short", "1", "2", "17", "50", "1-and-3", "3-and-1"],
)
def test_many_short_documents_have_similar_work(
    lengths: list[int], bound: float, size: int
) -> None:
    """Also where each document gives one rank more than the others."""
    pairs = [int((shard.position + 1).sum()) for shard in shards_of(lengths, size)]
    assert max(pairs) * size <= bound * sum(pairs)


def test_chunks_rotate_from_document_to_document() -> None:
    """Even where they have equally many tokens."""
    first, second = shards_of([2, 2, 2, 2], 2)
    assert first.position.tolist() == [1, 0, 1, 0]
    assert second.position.tolist() == [0, 1, 0, 1]


def test_example_of_the_documentation() -> None:
    """docs/scale.md, section 7."""
    first, second = shards_of([8, 5, 1], 2)
    assert first.document.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert first.position.tolist() == [0, 1, 6, 7, 0, 3, 4]
    assert second.document.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert second.position.tolist() == [2, 3, 4, 5, 1, 2, 0]
