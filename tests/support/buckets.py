"""Buckets of distances by integer arithmetic, as an oracle."""

from __future__ import annotations


def bucket_by_integers(
    distance: int, buckets: int, max_distance: int, *, bidirectional: bool
) -> int:
    """Bucket of a distance (query index minus key index), as `nn.distance_buckets` has it.

    Wide bucket n begins at the first distance d with d / single >= (max_distance / single) ** (n /
    wide), where `single` buckets hold one distance each and `wide` buckets more.
    """
    side = buckets // 2 if bidirectional else buckets
    single = side // 2
    wide = side - single
    first = side if bidirectional and distance < 0 else 0
    d = abs(distance) if bidirectional else max(distance, 0)
    if d < single:
        return first + d
    begun = [n for n in range(wide) if d**wide * single**n >= max_distance**n * single**wide]
    return first + single + max(begun)
