"""Decoding with pages and grouped heads.

A server that decodes many sequences keeps their keys and values in pages of one pool, and gives a
sequence a page when its last one is full. A block table lists the pages of each sequence.
`append_to_cache` writes new tokens into the pages, `attention_decode` reads them in place and
splits long sequences over the threads. Query heads that share a key head (grouped-query attention)
are computed together, so that each page is read once.

Here two of three sequences decode together; when one ends, its pages serve the third.

    $ python examples/paged_decoding.py
    two sequences of [120, 120] tokens, 16 pages
    a third in the place of the first: [100, 220] tokens, 21 pages; caches of full length take 32
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_kernels import Mask, append_to_cache, attention, attention_decode

HEADS, KEY_HEADS, WIDTH, PAGE, POOL, LONGEST = 8, 2, 64, 16, 24, 256


class Pool:
    """Pages of keys and values, and the block table of the sequences that are decoded."""

    def __init__(self, sequences: int) -> None:
        # NaN: a page that is read before it is written would show.
        self.k = torch.full((POOL, KEY_HEADS, PAGE, WIDTH), torch.nan)
        self.v = self.k.clone()
        self.free = list(range(POOL))
        self.table = torch.zeros(sequences, LONGEST // PAGE, dtype=torch.int32)
        self.lengths = torch.zeros(sequences, dtype=torch.int32)

    def extend(self, tokens: int) -> None:
        """Makes room for `tokens` new tokens in every sequence."""
        for sequence, length in enumerate(self.lengths.tolist()):
            for n in range(-(-length // PAGE), -(-(length + tokens) // PAGE)):
                self.table[sequence, n] = self.free.pop()
        self.lengths += tokens

    def release(self, sequence: int) -> None:
        pages = -(-int(self.lengths[sequence]) // PAGE)
        self.free += self.table[sequence, :pages].tolist()
        self.lengths[sequence] = 0


def decode(pool: Pool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of new tokens (sequences, heads, tokens, width) to all of their sequences."""
    pool.extend(q.shape[2])
    append_to_cache(pool.k, pool.v, k, v, pool.lengths, pool.table)
    return attention_decode(q, pool.k, pool.v, pool.lengths, pool.table)


def main() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, HEADS, LONGEST, WIDTH)
    k, v = (torch.randn(3, KEY_HEADS, LONGEST, WIDTH) for _ in range(2))
    expected = attention(q, k, v, mask=Mask.causal())
    pool, running, place = Pool(2), torch.tensor([0, 1]), torch.tensor([0, 0])

    def step(tokens: int) -> None:
        columns = place[:, None] + torch.arange(tokens)
        new = [x[running[:, None], :, columns].transpose(1, 2) for x in (q, k, v, expected)]
        torch.testing.assert_close(decode(pool, *new[:3]), new[3])
        place.add_(tokens)

    step(40)  # the prompts
    for _ in range(80):
        step(1)
    print(f"two sequences of {pool.lengths.tolist()} tokens, {POOL - len(pool.free)} pages")
    pool.release(0)
    running[0], place[0] = 2, 0
    for _ in range(100):
        step(1)
    print(f"a third in the place of the first: {pool.lengths.tolist()} tokens", end=", ")
    print(f"{POOL - len(pool.free)} pages; caches of full length take {2 * LONGEST // PAGE}")


if __name__ == "__main__":
    main()
