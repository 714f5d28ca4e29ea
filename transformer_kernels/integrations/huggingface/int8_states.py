"""Keys and values of an `Int8Cache` on their way through a model, and attention to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...functional.decode import attention_decode
from ...masks.constraints import KeyRange, Window
from ...masks.mask import Mask


class Int8States(Tensor):
    """Keys or values (B, H_kv, N, width) in int8, as a cache returns them to a layer.

    The layer passes them to its attention function. Any operation raises TypeError: the numbers
    mean nothing without their scales.

    Attributes:
        numbers: the same as a plain tensor.
        scale: float32 (B, H_kv, N), one for each row.
    """

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def of(numbers: Tensor, scale: Tensor) -> Int8States:
        states: Int8States = numbers.as_subclass(Int8States)
        states.numbers, states.scale = numbers, scale
        return states

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Int8States(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", func)
        if name not in ("__get__", "size", "dim"):
            raise TypeError(
                f"{name} does not take the keys and values of an "
                "Int8Cache: the model must have attn_implementation='transformer_kernels', and its "
                "layers must pass them to attention as they are"
            )
        run: Any = super().__torch_function__
        return run(func, types, args, kwargs or {})


def attention_to_int8(
    query: Tensor,
    key: Int8States,
    value: Int8States,
    *,
    mask: Mask | None,
    bias: Tensor | None,
    dropout_p: float,
    **options: Any,
) -> Any:
    """Computes `attention` to the keys and values of an `Int8Cache`.

    Args:
        query: (B, H_q, M, D), the last M tokens.
        key: (B, H_kv, N, D).
        value: (B, H_kv, N, D_v).
        mask: windows and key ranges.
        bias: must be None.
        dropout_p: must be 0.
        options: scale, softcap, sinks, return_lse.

    Raises:
        ValueError: a mask, bias or dropout that `attention_decode` does not support.
    """
    (B, _, M, _), N = query.shape, key.shape[2]
    if bias is not None or dropout_p != 0.0:
        raise ValueError("an Int8Cache does not support biases, dense masks and dropout")
    lengths = torch.full((B,), N, dtype=torch.int32, device=query.device)
    return attention_decode(
        query, key.numbers, value.numbers, lengths,
        mask=Mask() if mask is None else _of_last_queries(mask, M, N),
        k_scale=key.scale, v_scale=value.scale, **options,
    )  # fmt: skip


def _of_last_queries(mask: Mask, M: int, N: int) -> Mask:
    """Returns the mask with bottom-right alignment."""
    constraints = []
    for one in mask.constraints:
        if isinstance(one, Window):
            low, high = one.diagonals(one.offset(M, N))
            left = None if low is None else N - M - low
            right = None if high is None else high - (N - M)
            one = Window(left, right, "bottom_right")
        elif not isinstance(one, KeyRange):
            raise ValueError(
                "an Int8Cache supports windows and padding on one side, got a mask with "
                f"{type(one).__name__}"
            )
        constraints.append(one)
    return Mask(tuple(constraints))
