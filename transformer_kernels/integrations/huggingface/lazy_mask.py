"""The `LazyMask` tensor: an additive mask whose values are computed only if they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...masks.mask import Mask

_KEEP_STRUCTURE = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default,
)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask that "eager" adds to its scores: 0 where `visible`, else the least number.

    Source: `transformers.masking_utils.eager_mask`.
    """
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


class LazyMask(Tensor):
    """A mask (B, 1, M, N) that "eager" adds to its scores, defined by a `Mask`: no M x N memory.

    Models pass it on to the attention function, which reads `mask`. To any other torch operation
    it is the tensor of values that "eager" would get: 0 = visible, the least number of its dtype =
    hidden. They are computed once, and may be changed in place, also through a slice.
    `to` and `detach()` keep the structure. torch.compile takes a LazyMask as an input of the
    compiled function.

    Attributes:
        mask: the visible pairs.
        may_be_packed: the model was called on complete sequences. They may be packed documents,
            which only the positions show.
        tokens: padding mask of the keys, bool (B, N), if the call has one; True = a token.
        is_divided: `mask` is that of a sequence, of which the tensor's M x N are those of a shard.
        documents: positions, and the mask of the packed documents by them: the layers of a model
            ask about the same positions.
    """

    mask: Mask
    may_be_packed: bool
    tokens: Tensor | None
    is_divided: bool
    documents: tuple[Tensor, Mask | None] | None
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls: type[LazyMask],
        mask: Mask,
        size: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        **attributes: Any,
    ) -> LazyMask:
        """Creates the mask of B x M x N = size."""
        B, M, N = size
        with torch.inference_mode(False):  # inference tensors do not tell whether they are changed
            # torch's constructor of tensors without storage
            self: LazyMask = Tensor._make_wrapper_subclass(
                cls, (B, 1, M, N), dtype=dtype, device=device
            )
        return self

    def __init__(
        self,
        mask: Mask,
        size: tuple[int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        may_be_packed: bool = False,
        tokens: Tensor | None = None,
        is_divided: bool = False,
    ) -> None:
        self.mask = mask
        self.may_be_packed = may_be_packed
        self.tokens = tokens
        self.is_divided = is_divided
        self.documents = None
        self._dense = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.mask}, size={tuple(self.shape)}, device={self.device})"

    def visible(self) -> Tensor:
        """Returns the visible pairs, bool (B, 1, M, N).

        Raises ValueError for a mask of a divided sequence.
        """
        if self.is_divided:
            raise ValueError("the mask of a divided sequence (context_parallel) has no values")
        B, H, M, N = self.shape
        return self.mask.materialize(B, H, M, N, self.device)

    def dense(self) -> Tensor:
        """Returns the values, of which there is one tensor.

        Raises ValueError for a mask of a divided sequence.
        """
        if self._dense is None:
            with torch.inference_mode(False):
                self._dense = additive(self.visible(), self.dtype)
        return self._dense

    @property
    def is_changed(self) -> bool:
        """The values were changed in place: they, and not `mask`, are the mask."""
        return self._version > 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEEP_STRUCTURE and not args[0].is_changed:
            dtype = kwargs.get("dtype") or args[0].dtype
            if dtype.is_floating_point:
                return args[0]._on(kwargs.get("device") or args[0].device, dtype)
        values, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
        result = func(*values, **kwargs)
        is_own = args and isinstance(args[0], LazyMask) and result is args[0]._dense
        return args[0] if is_own else result

    def _on(self, device: torch.device, dtype: torch.dtype) -> LazyMask:
        B, _, M, N = self.shape
        return LazyMask(
            self.mask.to(device), (B, M, N), device, dtype,
            may_be_packed=self.may_be_packed, is_divided=self.is_divided,
            tokens=None if self.tokens is None else self.tokens.to(device),
        )  # fmt: skip
