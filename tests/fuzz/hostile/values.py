"""Values that an argument must not have, or hardly any caller gives, by name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter

from tests.support.runtime import freed, freed_view, misaligned
from transformer_kernels import Mask, alibi, relative_bias, relative_keys

Make = Callable[[Tensor], object]


class Unprintable:
    """An object that cannot be shown in a message."""

    def __repr__(self) -> str:
        raise ValueError


class Subclass(Tensor):
    """A tensor of another type, without behavior of its own."""


OBJECTS: dict[str, object] = {
    "0": 0, "1": 1, "-1": -1, "2**31 - 1": 2**31 - 1, "2**31": 2**31, "2**63 - 1": 2**63 - 1,
    "-2**63": -(2**63), "2**63": 2**63, "1e-320": 1e-320, "1e308": 1e308, "-1e308": -1e308,
    "0.5": 0.5, "numpy float64": np.float64(0.5), "meta": "meta", "cuda:7": "cuda:7", "mps": "mps",
    "reference": "reference", "triton": "triton", "bottom_right": "bottom_right",
    "window": Mask.window(1, 1, align="bottom_right"), "padding": Mask.padding(torch.tensor([1])),
    "dense": Mask.dense(torch.ones(2, 2, dtype=torch.bool)), "alibi": alibi(torch.ones(3)),
    "relative": relative_bias(torch.ones(3, 2), lowest=0),
    "keys": relative_keys(torch.ones(3, 2, 8), lowest=0),
}  # fmt: skip
"""Valid for some arguments."""

REFUSED: dict[str, object] = {
    "bytes": b"\xff", "str": "\x00", "list": [1.0], "tuple": (1, 2), "dict": {}, "object": object(),
    "unprintable": Unprintable(), "function": len, "type": Tensor, "dtype": torch.float32,
    "NotImplemented": NotImplemented, "complex": 1j, "Fraction": Fraction(1, 3),
    "Decimal": Decimal("0.5"), "numpy int64": np.int64(1), "numpy bool": np.bool_(True),
    "numpy array": np.ones(3), "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"),
    "10**400": 10**400, "-10**400": -(10**400),
}  # fmt: skip
"""Not valid for any argument."""


def strided_like(x: Tensor, *strides: int) -> Tensor:
    """A copy of x with the given strides of its first dimensions; elements share memory."""
    flat = torch.zeros(x.numel() * (1 + sum(strides)) + 1, dtype=x.dtype)
    return flat.as_strided(x.shape, (*strides, *[1] * x.dim())[: x.dim()])


def transposed(x: Tensor) -> Tensor:
    reverse = list(range(x.dim()))[::-1]
    return x.permute(reverse).contiguous().permute(reverse)


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """x with another size of one dimension, as far as it has dimensions; repeats its first row."""
    if x.dim() == 0:
        return x.expand(size)
    dim = min(dim, x.dim() - 1)
    if x.shape[dim] == 0:
        x = x.new_ones(*x.shape[:dim], 1, *x.shape[dim + 1 :])
    first = x.narrow(dim, 0, 1)
    return first.expand(*x.shape[:dim], size, *x.shape[dim + 1 :])


def with_size(dim: int, change: Callable[[int], int]) -> Make:
    return lambda x: resized(x, dim, change(x.shape[dim] if dim < x.dim() else 1))


def constant(value: object) -> Make:
    return lambda x: value


def extreme(x: Tensor, end: Literal["min", "max"]) -> Tensor:
    if x.dtype == torch.bool:
        return torch.full_like(x, end == "max")
    info = torch.finfo if x.is_floating_point() else torch.iinfo
    return torch.full_like(x, getattr(info(x.dtype), end))


def bool_bytes(x: Tensor, byte: int) -> Tensor:
    """A bool tensor whose bytes are not 0 or 1."""
    return torch.full(x.shape, byte, dtype=torch.uint8).view(torch.bool)


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    parts = list(x) if x.dim() > 1 and x.shape[0] else [x.reshape(-1)]
    return torch.nested.nested_tensor(parts, layout=layout)


def matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.new_ones(1, 1)


def fake(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def batched(x: Tensor) -> Tensor:
    """A tensor of `torch.vmap`, outside of it."""
    kept: list[Tensor] = []
    torch.vmap(lambda y: kept.append(y) or y)(torch.stack([x, x]))  # type: ignore[func-returns-value]
    return kept[0]


def float_like(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip

NOT_STRIDED: dict[str, Make] = {
    "COO": Tensor.to_sparse,
    "CSR": lambda x: matrix(x).to_sparse_csr(),
    "CSC": lambda x: matrix(x).to_sparse_csc(),
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
    "mkldnn": lambda x: matrix(x).float().to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
}
"""Refused by all arguments, as are tensors that are freed."""

SIZES: dict[str, Callable[[int], int]] = {
    "0": lambda size: 0,
    "1": lambda size: 1,
    "plus 1": lambda size: size + 1,
    "minus 1": lambda size: max(size - 1, 0),
    "2**40": lambda size: 1 << 40,
}

SHAPES: dict[str, Make] = {
    "no dimension": lambda x: x.new_ones(()),
    "empty": lambda x: x.new_ones(0),
    "one dimension less": lambda x: x[0] if x.dim() and x.shape[0] else x,
    "one dimension more": lambda x: x[None],
    "seven dimensions": lambda x: x[(None,) * (7 - x.dim())],
    **{
        f"size {name} in dimension {dim}": with_size(dim, change)
        for name, change in SIZES.items()
        for dim in range(4)
    },
}

MEMORY: dict[str, Make] = {
    "transposed": transposed,
    "misaligned": lambda x: misaligned(x) if x.numel() else x,
    "overlapping": strided_like,
    "overlapping rows": lambda x: strided_like(x, 3, 2),
    "expanded": lambda x: x.new_ones(()).expand(x.shape),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "negated view": lambda x: torch._neg_view(x) if x.dtype != torch.bool else x,
    "conjugated view": lambda x: x.to(torch.complex64).conj(),
    "inference": inference,
    "Parameter": lambda x: Parameter(x, requires_grad=x.is_floating_point()),
    "requires grad": lambda x: float_like(x).clone().requires_grad_(),
    "subclass": lambda x: x.as_subclass(Subclass),
    "meta": lambda x: x.to("meta"),
}

CONTENTS: dict[str, Make] = {
    "zeros": torch.zeros_like,
    "largest": lambda x: extreme(x, "max"),
    "smallest": lambda x: extreme(x, "min"),
    "-1": lambda x: torch.zeros_like(x) - 1 if x.dtype != torch.bool else ~x,
    "flipped": lambda x: x.flip(tuple(range(x.dim()))),
    "incremented": lambda x: x + 1 if x.dtype != torch.bool else ~x,
    "NaN": lambda x: torch.full_like(float_like(x), float("nan")),
    "infinity": lambda x: torch.full_like(float_like(x), float("inf")),
    "bool bytes 2": lambda x: bool_bytes(x, 2),
    "bool bytes 255": lambda x: bool_bytes(x, 255),
}

TENSORS: dict[str, Make] = {
    **SHAPES,
    **MEMORY,
    **CONTENTS,
    **{str(dtype): partial(Tensor.to, dtype=dtype) for dtype in DTYPES},
    **NOT_STRIDED,
    "freed": freed,
    "freed view": freed_view,
    "fake": fake,
    "batched": batched,
}

VALUES: dict[str, Make] = {
    "None": constant(None),
    "True": constant(True),
    **{name: constant(value) for name, value in (OBJECTS | REFUSED).items()},
    **{f"tensor: {name}": make for name, make in TENSORS.items()},
}
"""Name of a value -> the function that makes it from a valid tensor of the argument."""

NEVER_VALID = frozenset((*REFUSED, *(f"tensor: {name}" for name in NOT_STRIDED)))
"""Names of the values that no argument may have."""
