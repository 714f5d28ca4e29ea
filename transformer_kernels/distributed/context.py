"""The switch: within it, `attention` and what is built on it run on divided sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..common.argument_checks import check_bool, check_int, shown
from ..dispatch.division import divided
from .attention import all_to_all_attention, ring_attention
from .peers import Group, Peers
from .sequence import SequenceLayout, check_layout, shard_sequence, unshard_sequence

Method = Literal["ring", "all_to_all"]
"""The operator that computes attention: `ring_attention` or `all_to_all_attention`."""


@dataclass(frozen=True)
class ContextParallel:
    """A sequence that is divided over processes; see `context_parallel`.

    Attributes:
        group: process group that the sequence is divided over.
        heads_group: second process group, of a two-dimensional mesh; see `ring_attention`.
        method: "ring" or "all_to_all".
        layout: layout of the tokens; see `SequenceLayout`.
        check: the ranks compare the arguments of each call of `attention` first.
    """

    group: dist.ProcessGroup
    heads_group: dist.ProcessGroup | None = None
    method: Method = "ring"
    layout: SequenceLayout = "zigzag"
    check: bool = True

    @property
    def ranks(self) -> int:
        """Number of ranks that a sequence is divided over."""
        heads = 1 if self.heads_group is None else dist.get_world_size(self.heads_group)
        return dist.get_world_size(self.group) * heads

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's tokens of a tensor that every rank has; see `shard_sequence`."""
        return shard_sequence(x, dim=dim, **self._groups)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Returns the undivided tensor, on every rank; see `unshard_sequence`."""
        return unshard_sequence(x, dim=dim, **self._groups)

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the indices of this rank's tokens in the sequence, int64 (count,).

        Args:
            count: number of tokens of a shard.
            device: device of the result.

        Raises:
            ValueError: shards of this layout cannot have `count` tokens.
        """
        check_int("count", count, 0)
        return self.shard(torch.arange(count * self.ranks, device=device), 0)

    @property
    def _groups(self) -> dict[str, Any]:
        return {"group": self.group, "heads_group": self.heads_group, "layout": self.layout}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Computes (o, lse) of `attention` of shards, with its options."""
        options |= {"check": self.check, "return_lse": True}
        results: tuple[Tensor, Tensor]
        if self.method == "ring":
            results = ring_attention(q, k, v, **self._groups, **options)
        else:
            results = all_to_all_attention(q, k, v, group=self.group, layout=self.layout, **options)
        return results


@contextmanager
def context_parallel(
    mesh: DeviceMesh | Group = None,
    *,
    method: Method = "ring",
    layout: SequenceLayout = "zigzag",
    check: bool = True,
) -> Iterator[ContextParallel]:
    """Divides the sequences of all `attention` calls in the context over processes.

    Every rank calls a model with its tokens of each sequence. Layers that work token by token need
    no change. `attention`, the `nn` modules, HuggingFace models with `attn_implementation=
    "transformer_kernels"`, and torch's `scaled_dot_product_attention` under `enable()` compute the
    result of the undivided sequence. Masks are those of the sequence; tensors by token, such as
    segment ids, those of the shard (docs/scale.md).

    Examples:
        >>> with context_parallel(mesh["context"]) as context:
        ...     logits = model(context.shard(tokens, dim=1))
        ...     loss = cross_entropy(logits, context.shard(labels, dim=1))
        ...     loss.backward()

    A function that cannot run on shards, such as `attention_varlen`, `attention_decode` or
    `linear_attention`, raises a ValueError. The backward pass may be outside of the context, unless
    it recomputes activations. The state is that of the process: all threads are in the context.

    Args:
        mesh: DeviceMesh of one dimension, or of two: ring and heads, for `ring_attention` with a
            `heads_group`. Or a process group; default: the default group.
        method: "ring" or "all_to_all".
        layout: "zigzag" or "contiguous"; see `SequenceLayout`.
        check: the ranks compare the arguments of each call first.

    Yields:
        the division: `shard`, `unshard` and `positions` have its groups and its layout.

    Raises:
        TypeError: `mesh` is neither a DeviceMesh nor a process group.
        ValueError: `mesh` has more than two dimensions, or two with "all_to_all"; an option is none
            of its choices; or torch.distributed is not initialized.

    Source: Liu et al. 2023, arXiv:2310.01889; torch.distributed.tensor.experimental.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be 'ring' or 'all_to_all', got {shown(method)}")
    check_layout(layout)
    check_bool("check", check)
    group, heads_group = _groups_of(mesh, method)
    context = ContextParallel(group, heads_group, method, layout, check)
    with divided(context):
        yield context


def _groups_of(
    mesh: DeviceMesh | Group, method: Method
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Returns the groups of the ring and of the heads."""
    if not isinstance(mesh, DeviceMesh):
        if mesh is not None and not isinstance(mesh, dist.ProcessGroup | int):
            raise TypeError(
                f"mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}"
            )
        return Peers.of(mesh, "mesh").group, None
    if mesh.ndim > (2 if method == "ring" else 1):
        raise ValueError(
            f"mesh must have one dimension, or two with the method 'ring', got {mesh.ndim} with "
            f"{method!r}"
        )
    groups = [Peers.of(mesh.get_group(n), "mesh").group for n in range(mesh.ndim)]
    return groups[0], groups[1] if mesh.ndim == 2 else None
