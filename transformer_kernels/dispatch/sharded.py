"""Calls with DTensors, sharded by batch or heads: each rank runs the kernels on its own part.

torch.distributed.tensor, whose import takes half a second, is imported once a DTensor exists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..common.storage import PLAIN_TYPES
from ..problem import Problem, shape_of
from ..problem.fields import FIELDS

_BATCH, _HEADS = 0, 1
_FIELDS = {field.name: field for field in FIELDS}


def are_distributed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for DTensors. Raises TypeError if only some of the tensors are."""
    if type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    are = [isinstance(x, module.DTensor) for x in (q, k, v)]
    if any(are) and not all(are):
        types = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v must all be DTensors if one of them is, got {types}")
    return all(are)


@dataclass(frozen=True)
class Sharding:
    """How a call is divided over a mesh of ranks."""

    mesh: Any
    dims: tuple[int | None, ...]
    """For each dimension of the mesh the dimension of q, k, v and o that it shards, _BATCH or
    _HEADS; None if its ranks compute the same."""

    def part(self, x: Tensor, dims: Sequence[int | None]) -> Tensor:
        """Returns this rank's part of a tensor. A plain tensor is the whole one, on every rank.

        `dims` are x's own dimensions for batch and heads; None if every rank needs the whole
        tensor, whose gradient is then the sum over the ranks.
        """
        from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

        wanted: list[Placement] = []
        of_gradient: list[Placement] = []
        for sharded in self.dims:
            dim = None if sharded is None else dims[sharded]
            wanted.append(Replicate() if dim is None else Shard(dim))
            is_shared = sharded is not None and dim is None
            of_gradient.append(Partial() if is_shared else wanted[-1])
        if not isinstance(x, DTensor):
            whole = [Replicate()] * self.mesh.ndim
            x = DTensor.from_local(x, self.mesh, whole, run_check=False)
        placed = x.redistribute(placements=wanted)
        part: Tensor = placed.to_local(grad_placements=of_gradient)
        return part

    def whole(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns the DTensor of a result (B, H_q, ...), given this rank's part."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if dim is None else Shard(dim) for dim in self.dims]
        stride, step = [0] * x.dim(), 1
        for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
            stride[dim], step = step, step * max(shape[dim], 1)
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def sharding_of(problem: Problem, q: Any, k: Any, v: Any) -> Sharding:
    """Returns the sharding of a call with DTensors: q's, or else k's or v's.

    Raises ValueError if the kernels cannot run on the ranks' parts, and for dropout.
    """
    if problem.scores.dropout_p:
        raise ValueError(f"dropout_p must be 0 for DTensors, got {problem.scores.dropout_p}")
    mesh = q.device_mesh
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if x.device_mesh != mesh:
            raise ValueError(f"{name} is on {x.device_mesh}, q is on {mesh}")
    is_packed = problem.layout.cu_seqlens_q is not None or problem.layout.block_table is not None
    allowed = {_HEADS: "heads"} if is_packed else {_BATCH: "batch", _HEADS: "heads"}
    dims: list[int | None] = []
    for n in range(mesh.ndim):
        found = [_sharded_dim(name, x, n, allowed) for name, x in named]
        dims.append(next((dim for dim in found if dim is not None), None))
    ranks = math.prod([mesh.size(n) for n, dim in enumerate(dims) if dim == _HEADS])
    if problem.shape.H_kv % ranks != 0:
        raise ValueError(
            f"heads are sharded over {ranks} ranks: k and v must have a multiple of {ranks} heads, "
            f"got {problem.shape.H_kv}"
        )
    return Sharding(mesh, tuple(dims))


def own_part(
    problem: Problem, sharding: Sharding, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """Returns this rank's part of a call."""
    q, k, v = (sharding.part(x, (_BATCH, _HEADS)) for x in (q, k, v))
    options = {name: sharding.part(x, _dims_of(name, x)) for name, x in problem.tensors().items()}
    shape = shape_of(q, k, v, problem.layout)
    return replace(problem.with_tensors(options), shape=shape), q, k, v


def _sharded_dim(name: str, x: Any, n: int, allowed: Mapping[int, str]) -> int | None:
    """Returns the dimension of x that dimension n of the mesh shards, if any."""
    from torch.distributed.tensor import Shard

    placement = x.placements[n]
    if placement.is_replicate() or placement.is_partial():
        return None
    if isinstance(placement, Shard) and placement.dim in allowed:
        return placement.dim
    raise ValueError(
        f"{name} must be replicated or sharded by {' or '.join(allowed.values())}, got "
        f"{placement!r} of (batch, heads, length, width) in dimension {n} of the mesh"
    )


def _dims_of(name: str, x: Tensor) -> tuple[int | None, int | None]:
    """Returns an option's dimensions for batch and heads; None where it has none, or size 1 that
    broadcasts."""
    batch, heads = (_FIELDS[name].dimension(symbol) for symbol in ("B", "H_q"))
    return _unless_broadcast(batch, x), _unless_broadcast(heads, x)


def _unless_broadcast(dimension: tuple[int, bool] | None, x: Tensor) -> int | None:
    if dimension is None or (dimension[1] and x.shape[dimension[0]] == 1):
        return None
    return dimension[0]
