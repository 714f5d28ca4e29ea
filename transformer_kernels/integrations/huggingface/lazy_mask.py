"""The `LazyMask` tensor: a dense attention mask whose values are computed only if they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from transformer_kernels.masks.mask import Mask

_KEEP_STRUCTURE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LazyMask(Tensor):
    """A bool tensor (B, 1, M, N), True = visible, defined by a `Mask`, without M x N memory.

    Models pass it on to the attention function, which reads `mask`. Any other torch operation,
    such as a slice, gets the values. `to(device)` and `detach()` keep the structure. torch.compile
    takes a LazyMask as an input of the compiled function.

    Attributes:
        mask: the visible pairs.
        may_be_packed: the model was called without a padding mask on complete sequences. They may
            be packed documents, which only the positions show.
        is_divided: `mask` is that of a sequence, of which the tensor's M x N are those of a shard.
    """

    mask: Mask
    may_be_packed: bool
    is_divided: bool

    @staticmethod
    def __new__(
        cls: type[LazyMask],
        mask: Mask,
        size: tuple[int, int, int],
        device: torch.device,
        may_be_packed: bool,
        is_divided: bool = False,
    ) -> LazyMask:
        """Creates the mask of B x M x N = size."""
        B, M, N = size
        # torch's constructor of tensors without storage
        self: LazyMask = Tensor._make_wrapper_subclass(
            cls, (B, 1, M, N), dtype=torch.bool, device=device
        )
        return self

    def __init__(
        self,
        mask: Mask,
        size: tuple[int, int, int],
        device: torch.device,
        may_be_packed: bool,
        is_divided: bool = False,
    ) -> None:
        self.mask = mask
        self.may_be_packed = may_be_packed
        self.is_divided = is_divided

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.mask}, size={tuple(self.shape)}, device={self.device})"

    def dense(self) -> Tensor:
        """Returns the values, a bool tensor (B, 1, M, N).

        Raises ValueError for a mask of a divided sequence.
        """
        if self.is_divided:
            raise ValueError("the mask of a divided sequence (context_parallel) has no values")
        B, H, M, N = self.shape
        return self.mask.materialize(B, H, M, N, self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEEP_STRUCTURE:
            return args[0]._on(args[0].device)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return args[0]._on(kwargs.get("device") or args[0].device)
        args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    def _on(self, device: torch.device) -> LazyMask:
        B, _, M, N = self.shape
        return LazyMask(
            self.mask.to(device), (B, M, N), device, self.may_be_packed, self.is_divided
        )
