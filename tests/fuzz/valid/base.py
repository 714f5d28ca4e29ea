"""Base class of valid calls: common options, the state in which they run, inputs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.call import Call
from tests.fuzz.valid.oracle import Expected, Rounding
from tests.fuzz.valid.oracle import check as check_element
from tests.fuzz.valid.relative import Relative
from tests.support import emulator
from tests.support.cases import Layout, lay_out
from tests.support.poison import poisoned_memory
from transformer_kernels import _C
from transformer_kernels.masks.constraints import Align
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.philox import keep_factor, keep_mask
from transformer_kernels.scores.relative import Relative as Distances

SEED = -1234567890123456789
"""Dropout seed; it uses both words of the Philox key."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Valid(Call):
    """A call whose result is compared with the oracle."""

    backend: str = "cpu"
    isa: str = "auto"
    """instruction set of the CPU kernels"""
    threads: int = 1
    chip: int = 80
    """compute capability of emulated CUDA kernels"""
    schedule: int = 0
    """order of the emulated threads"""
    poisoned: bool = False
    """True to fill uninitialized memory with NaN"""
    seed: int = 0
    """seed of the inputs"""
    dtype: str = "float32"
    deviation: float = 1.0
    """standard deviation of the scores"""
    H_kv: int = 1
    group: int = 1
    """query heads per key head"""
    D: int = 8
    D_v: int = 8
    layout: Layout = "contiguous"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    relative: Relative | None = None
    alibi_by_sequence: bool = False
    """True if the slopes of ALiBi differ between sequences"""

    @property
    def H_q(self) -> int:
        return self.H_kv * self.group

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def statistics(self) -> torch.dtype:
        """dtype of lse, sinks, slopes and tables."""
        return torch.float64 if self.torch_dtype == torch.float64 else torch.float32

    @property
    def effective_scale(self) -> float:
        return self.D**-0.5 if self.scale is None else self.scale

    def check(self) -> None:
        with self._state():
            got = self.results()
        expected = self.expected(Rounding.of(self.torch_dtype))
        for name, value in got.items():
            check_element(name, value, expected[name])

    def options(self) -> dict[str, Any]:
        """Options that every function has, by the names of the arguments."""
        return {"scale": self.scale, "softcap": self.softcap, "backend": self.backend}

    @abstractmethod
    def results(self) -> dict[str, Tensor]:
        """Makes the call. Returns its results by name."""

    @abstractmethod
    def expected(self, rounding: Rounding) -> dict[str, Expected]:
        """Returns the results by the oracle; there may be more than the call has."""

    @contextmanager
    def _state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(_C.force_isa, _C.isa())
            _C.force_isa(self.isa)
            if self.backend == "cuda":
                stack.enter_context(emulator.chip(self.chip))
                stack.enter_context(emulator.schedule(self.schedule))
            if self.poisoned:
                stack.enter_context(poisoned_memory())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self.threads)
            yield

    def normal(self, name: str, *shape: int, deviation: float = 1.0) -> Tensor:
        """Normal numbers in the dtype of the call, the same in every process."""
        generator = torch.Generator().manual_seed(self.seed * 16 + _NAMES.index(name))
        numbers = torch.randn(shape, generator=generator) * deviation
        statistic = name in ("dlse", "sinks", "slopes", "table")
        return numbers.to(self.statistics if statistic else self.torch_dtype)

    def qkv(self, q_rows: tuple[int, int], k_rows: tuple[int, int]) -> tuple[Tensor, ...]:
        """Contiguous q, k and v for (B, length) of queries and of keys."""
        size = math.sqrt(self.deviation)
        (B, M), (entries, N) = q_rows, k_rows
        return (
            self.normal("q", B, self.H_q, M, self.D, deviation=size),
            self.normal("k", entries, self.H_kv, N, self.D, deviation=size),
            self.normal("v", entries, self.H_kv, N, self.D_v),
        )

    def laid_out(self, x: Tensor, dead: Tensor | None = None) -> Tensor:
        """Returns x in the layout of the call, with NaN where `dead`: bool (B, H, length)."""
        if dead is not None and self.layout != "expanded":
            x = x.masked_fill(dead[..., None], math.nan)
        return lay_out(x, self.layout)

    def sink_logits(self) -> Tensor:
        return self.normal("sinks", self.H_q)

    def by_distance(self) -> dict[str, Tensor]:
        """The table and the keys by distance by the names of the arguments, as far as there are."""
        if self.relative is None:
            return {}
        return self.relative.tensors(self.normal, self.H_q, self.D)

    def distances(self, x: Mapping[str, Tensor]) -> Distances | None:
        """The relative bias or keys with the tensors of `x`, if the call has one."""
        return None if self.relative is None else self.relative.of(x)

    def slopes(self, sequences: int) -> Tensor:
        """(H_q,), or (sequences, H_q) if they differ."""
        rows = (sequences,) if self.alibi_by_sequence else ()
        return self.normal("slopes", *rows, self.H_q).abs()

    def alibi_bias(self, align: Align | None, sequences: int) -> Alibi | None:
        return None if align is None else Alibi(self.slopes(sequences), align)

    def dense_alibi(
        self, align: Align | None, M: int, N: int, sequences: int, b: int | None = None
    ) -> Tensor | None:
        """The bias of ALiBi ([sequences,] H_q, M, N) in float64, by its definition, or that of
        sequence b; None without."""
        if align is None:
            return None
        d = N - M if align == "bottom_right" else 0
        distance = (torch.arange(M)[:, None] + d - torch.arange(N)).abs()
        slopes = self.slopes(sequences).double()
        if self.alibi_by_sequence and b is not None:
            slopes = slopes[min(b, sequences - 1)]  # trailing padding is one more sequence
        return -slopes[..., None, None] * distance

    def dropout_factors(
        self, dropout_p: float, B: int, H: int, M: int, N: int, first_batch: int = 0
    ) -> Tensor | None:
        """The factors of the weights (B, H, M, N); None without dropout."""
        if dropout_p == 0.0:
            return None
        kept = keep_mask(torch.tensor(SEED), B, H, M, N, dropout_p, (first_batch, 0, 0, 0))
        return kept.double() * keep_factor(dropout_p)


_NAMES = ("q", "k", "v", "do", "dlse", "bias", "sinks", "slopes", "table", "keys")


def with_gradients(
    result: Tensor | tuple[Tensor, Tensor], inputs: dict[str, Tensor], do: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    """Returns o, lse if there is one, and the gradients of inputs that require grad, by name."""
    o, lse = result if isinstance(result, tuple) else (result, None)
    found = {"o": o} if lse is None else {"o": o, "lse": lse}
    leaves = {f"d{name}": x for name, x in inputs.items() if x.requires_grad}
    if leaves:
        gradients = torch.autograd.grad(
            list(found.values()), list(leaves.values()), [do, dlse][: len(found)]
        )
        found |= dict(zip(leaves, gradients, strict=True))
    return {name: x.detach() for name, x in found.items()}
