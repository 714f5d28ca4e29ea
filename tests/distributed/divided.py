"""The table of attention cases, divided over processes and compared with the undivided call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.attention import Inputs, with_gradients
from tests.support.case import Outputs
from tests.support.cases import CASES, Case
from tests.support.runtime import poisoned_memory
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.distributed import (
    SequenceLayout,
    all_to_all_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from transformer_kernels.masks.constraints import Constraint, Dense, Intervals, Positions, Segments
from transformer_kernels.masks.mask import Mask
from transformer_kernels.masks.selected import Selected


@dataclass(frozen=True)
class Division:
    """A grid of processes: `heads` of them, neighbours, exchange heads for sequence."""

    layout: SequenceLayout
    heads: int
    ring: int
    group: dist.ProcessGroup | None = None
    heads_group: dist.ProcessGroup | None = None

    @staticmethod
    def of(layout: SequenceLayout, heads: int) -> Division:
        """Makes the groups of this process; all processes call it."""
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size // heads, heads), mesh_dim_names=("ring", "heads"))
        return Division(
            layout, heads, size // heads, mesh.get_group("ring"), mesh.get_group("heads")
        )

    def attend(self, *qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        attention: Any = all_to_all_attention if self.ring == 1 else ring_attention
        result: tuple[Tensor, Tensor] = attention(*qkv, **self._groups, return_lse=True, **options)
        return result

    def shard(self, x: Tensor, dim: int) -> Tensor:
        return shard_sequence(x, dim=dim, **self._groups)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        return unshard_sequence(x, dim=dim, **self._groups)

    @property
    def _groups(self) -> dict[str, Any]:
        if self.ring == 1:
            return {"group": self.heads_group, "layout": self.layout}
        heads = self.heads_group if self.heads > 1 else None
        return {"group": self.group, "heads_group": heads, "layout": self.layout}

    def fits(self, case: Case) -> bool:
        """True if the heads divide over the processes that exchange them."""
        q, kv = case.H_q % self.heads, case.H_kv % self.heads and self.heads % case.H_kv
        return not q and not kv

    def resized(self, case: Case) -> Case:
        """Returns the case with lengths that divide over the processes."""
        unit = self.ring * self.heads * (2 if self.layout == "zigzag" else 1)
        unit *= 16 if case.dropout_p else 1
        M, N = (-(-length // unit) * unit for length in (case.M, case.N))
        return replace(case, M=M, N=N)


def check_cases(
    layout: SequenceLayout, heads: str, dtype: str, backend: str, first: str, step: str
) -> None:
    """Compares every `step`-th case from `first` on with the undivided call."""
    division = Division.of(layout, int(heads))
    cases = [case for case in CASES if division.fits(case)]
    for case in cases[int(first) :: int(step)]:
        try:
            with poisoned_memory():
                _check_case(division.resized(case), division, getattr(torch, dtype), backend)
        except Exception as error:
            error.add_note(f"case {case.name}")
            raise


def _check_case(case: Case, division: Division, dtype: torch.dtype, backend: str) -> None:
    if dtype == torch.float64:
        case = replace(case, bias_is_float32=False)
    x = case.inputs(dtype)
    got = _divided(case, x, division, backend)
    if dtype == torch.float64:
        assert_same_function(got, case.run(x, "cpu"))
    else:
        case.expected(dtype).check(got)


def _divided(case: Case, x: Inputs, division: Division, backend: str) -> Outputs:
    """Returns the undivided outputs and gradients of a divided call."""
    shards = shards_of(x, division.shard)
    options = case.options(shards) | {"mask": shard_mask(case.make_mask(), division.shard)}
    del options["return_lse"]  # `attend` gives it
    o, lse = division.attend(shards.q, shards.k, shards.v, **options, backend=backend)
    results = with_gradients(shards, o, lse)
    return {name: _undivided(name, value, case, division) for name, value in results.items()}


def _undivided(name: str, value: Tensor, case: Case, division: Division) -> Tensor:
    if name in ("o", "lse", "dq", "dk", "dv"):
        return division.unshard(value, 2)
    if name == "dbias" and value.shape[-2] > 1:
        return division.unshard(value, -2)
    value = value.clone()
    dist.all_reduce(value)
    return value


Shard = Callable[[Tensor, int], Tensor]


def shards_of(x: Inputs, shard: Shard) -> Inputs:
    """Returns this rank's tokens of the inputs; tensors without tokens are those of all ranks."""

    def cut(value: Tensor, dim: int) -> Tensor:
        return shard(value.detach(), dim).requires_grad_(value.requires_grad)

    parts: dict[str, Any] = {name: cut(getattr(x, name), 2) for name in ("q", "k", "v", "do")}
    if x.dlse is not None:
        parts["dlse"] = cut(x.dlse, 2)
    if x.bias is not None and x.bias.shape[-2] > 1:
        parts["bias"] = cut(x.bias, -2)
    return replace(x, **parts)


def shard_mask(mask: Mask | None, shard: Shard) -> Mask | None:
    """Returns the mask with this rank's tokens and rows."""
    if mask is None:
        return None

    def of(one: Constraint) -> Constraint:
        match one:
            case Segments():
                return replace(one, q_ids=shard(one.q_ids, 1), k_ids=shard(one.k_ids, 1))
            case Positions():
                return replace(one, q_pos=shard(one.q_pos, -1), k_pos=shard(one.k_pos, -1))
            case Intervals():
                parts: dict[str, Any] = {name: shard(x, -1) for name, x in one.tensors().items()}
                return replace(one, **parts)
            case Selected():
                return replace(one, indices=shard(one.indices, 2))
            case Dense() if one.attn_mask.shape[2] > 1:
                return Dense(shard(one.attn_mask, 2))
        return one

    return Mask(tuple(map(of, mask.constraints)))
