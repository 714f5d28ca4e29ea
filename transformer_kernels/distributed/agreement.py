"""The check that all ranks make the same call, before they exchange keys and values."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .peers import Peers, control_group

_CHARACTERS = 2000
"""Longest description that an error shows."""


def check_agreement(groups: Sequence[Peers], call: Mapping[str, str]) -> None:
    """Raises ValueError on every rank unless all ranks of the groups pass the same call.

    ceil(log2 P) messages a rank and group: in round n a rank sends the digests that it has to the
    rank 2^n after it.

    Args:
        groups: groups of a grid of processes, one for each of its dimensions.
        call: description of each argument, by its name.
    """
    texts = [f"{name}: {text}" for name, text in call.items()]
    value = digest("\n".join(texts))
    agreed = True
    for peers in groups:
        digests = _gather(peers, torch.tensor([value]))[:, 0].tolist()
        agreed = agreed and all(digest == value for digest in digests)
        value = digest(str(digests))
    if agreed:
        return
    calls = torch.zeros(1, _CHARACTERS, dtype=torch.uint8)
    text = bytearray("\n".join(texts).encode()[:_CHARACTERS])
    calls[0, : len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    for peers in groups:
        calls = _gather(peers, calls.flatten()).reshape(-1, _CHARACTERS)
    raise ValueError(f"all ranks must make the same call, got\n{_differences(calls)}")


@contextmanager
def errors_on_all_ranks(groups: Sequence[Peers], *, check: bool) -> Iterator[None]:
    """Raises a TypeError or ValueError of an argument on all ranks of the groups, if `check`: the
    other ranks see it in their own `check_agreement`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if check:
            check_agreement(groups, {"error": str(error)})
        raise


def _differences(calls: Tensor) -> str:
    """Returns a line for each different call, with the arguments that not all ranks pass."""
    rows = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in calls]
    arguments = [row.split("\n") for row in rows]
    common = set[str].intersection(*map(set, arguments))
    lines = Counter("; ".join(one for one in call if one not in common) for call in arguments)
    return "\n".join(
        f"  on {count} of {len(rows)} ranks: {line or 'none of these'}"
        for line, count in lines.items()
    )


def _gather(peers: Peers, mine: Tensor) -> Tensor:
    """Returns the 1-D tensors of all ranks, (P, ...), by messages whose errors name a rank."""
    control = control_group(peers)
    rank, size = peers.rank, peers.size
    rows = mine.new_zeros(size, len(mine))  # row n: rank - n
    rows[0] = mine
    known = 1
    while known < size:
        count = min(known, size - known)
        control.exchange(
            to=(rank + known) % size,
            sent=[rows[:count].clone()],
            source=(rank - known) % size,
            received=[rows[known : known + count]],
        ).wait()
        known += count
    return rows[(rank - torch.arange(size)) % size]


def digest(content: str | Tensor) -> int:
    """Returns 56 bits that depend on every bit of a text or of a CPU tensor."""
    if isinstance(content, Tensor):
        raw = content.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        raw = content.encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=7).digest(), "big")
