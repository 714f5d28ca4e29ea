"""Cases: calls of the public operators by plain values, and the checks of their results.

The tables of the tests are lists of cases, and the fuzzer draws them.
"""

from __future__ import annotations

import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.masks import PlainValues
from tests.support.oracle import Bound
from transformer_kernels.bench.tolerance import assert_within_rule

Layout = Literal["contiguous", "transposed", "strided", "unaligned", "expanded"]
Device = torch.device | str
UNREAD_INT8 = -128
"""Value of int8 elements that must not be read, the one that `quantize_cache` never gives."""
Outputs = dict[str, Tensor]
"""o, lse or the states, and gradients, by name."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AnyCase(PlainValues, ABC):
    """One call of an operator. Its inputs depend on `name` and `seed` alone."""

    name: str = ""
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def inputs(self, dtype: torch.dtype, device: Device = "cpu") -> Any:
        """Returns the tensors of the call and the cotangents of its results."""

    @abstractmethod
    def run(self, x: Any, backend: str) -> Outputs:
        """Returns the results of the operator and the gradients."""

    @abstractmethod
    def reasons(self, backend: str, device: Device = "cpu") -> tuple[str, ...]:
        """Returns the reasons why the backend does not support the case, as `explain` has them."""

    @abstractmethod
    def expected(self, dtype: torch.dtype) -> Expected:
        """Returns the reference values for the tolerance rule."""

    @abstractmethod
    def bounds(self, dtype: torch.dtype) -> dict[str, Bound]:
        """Returns the exact results, and the allowed error of each element."""

    def generator(self) -> torch.Generator:
        text = f"{self.name}{self.seed or ''}"
        return torch.Generator().manual_seed(zlib.crc32(text.encode()))


class Expected(NamedTuple):
    exact: Outputs
    """plain torch in float64"""
    plain: Outputs
    """plain torch on the same inputs in the dtype under test; lse in the accumulation dtype"""
    terms: Mapping[str, float] = MappingProxyType({})
    """`gradient_terms` by name of the gradient"""
    counts: Mapping[str, int] = MappingProxyType({})
    """numbers of terms of the results that are compared as means"""

    def check(self, got: Outputs) -> None:
        """Raises AssertionError if an output violates the tolerance rule."""
        assert got.keys() == self.exact.keys()
        lse = self.exact.get("lse", torch.zeros(1))
        largest = float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0
        for name, value in got.items():
            count = self.counts.get(name, 1)
            results = (x / count for x in (value.cpu(), self.exact[name], self.plain[name]))
            assert_within_rule(
                name, *results,
                lse=0.0 if name == "lse" else largest, terms=self.terms.get(name, 0.0),
                spread=self.terms.get(f"{name}_spread", 0.0),
                stored=self.terms.get(f"{name}_stored", 0.0),
            )  # fmt: skip


def assert_case(case: AnyCase, dtype: torch.dtype, backend: str, device: Device = "cpu") -> None:
    """Asserts the tolerance rule for all results and gradients.

    The reference values are computed on the CPU, also if the backend runs on another device. A case
    that the backend does not support must be refused with its reasons.
    """
    x = case.inputs(dtype, device)
    if reasons := case.reasons(backend, device):
        with pytest.raises(ValueError, match=re.escape("; ".join(reasons))):
            case.run(x, backend)
        return
    got = case.run(x, backend)
    assert all(value.device.type == torch.device(device).type for value in got.values())
    case.expected(dtype).check(got)


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """Returns x in another memory layout ("expanded" repeats the first batch entry and head)."""
    B, H, L, width = x.shape
    unread = math.nan if x.is_floating_point() else UNREAD_INT8
    match layout:
        case "contiguous":
            return x
        case "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "strided":
            wide = x.new_full((B, H, L, 2 * width), unread)
            wide[..., ::2] = x
            return wide[..., ::2]
        case "unaligned":
            wide = x.new_full((B, H, L + 1, width + 1), unread)
            wide[:, :, 1:, 1:] = x
            return wide[:, :, 1:, 1:]
        case "expanded":
            return x[:1, :1].expand(B, H, L, width)


def named(cases: Sequence[AnyCase], *names: str) -> list[Any]:
    by_name = {case.name: case for case in cases}
    return [by_name[name] for name in names]
