"""Valid calls: a case, and the state in which it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.calls import Call
from tests.support import emulator
from tests.support.attention import Inputs, with_gradients
from tests.support.case import AnyCase, Outputs
from tests.support.cases import Case
from tests.support.masks import Dense, Window, each_of
from tests.support.runtime import poisoned_memory
from transformer_kernels import _C
from transformer_kernels.integrations.torch_sdpa import scaled_dot_product_attention
from transformer_kernels.integrations.torch_switch import enabled


@dataclass(frozen=True, kw_only=True, repr=False)
class Valid(Call):
    """A call whose results are compared with bounds of every element."""

    case: AnyCase
    dtype: str = "float32"
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

    def check(self) -> None:
        with self._state():
            got = self.results()
        bounds = self.case.bounds(self._dtype)
        for name, value in got.items():
            bounds[name].check(name, value)

    def results(self) -> Outputs:
        """Makes the call. Returns its results by name."""
        return self.case.run(self.case.inputs(self._dtype), self.backend)

    @property
    def _dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

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


@dataclass(frozen=True, kw_only=True, repr=False)
class SdpaCase(Case):
    """One call of `scaled_dot_product_attention`, direct or in place of torch's.

    `mask` is a dense mask, a causal one, both or none; a bias is passed as attn_mask.
    """

    replaced: bool = False
    """True to call torch's function inside `enabled()`"""
    return_lse: bool = False

    def run(self, x: Inputs, backend: str) -> Outputs:
        attn_mask: Tensor | None = x.bias
        for constraint in each_of(self.mask):
            if isinstance(constraint, Dense):
                attn_mask = constraint.attn_mask(self.sizes)
        call = functional.scaled_dot_product_attention
        with enabled() if self.replaced else nullcontext():
            o = (call if self.replaced else scaled_dot_product_attention)(
                x.q,
                x.k,
                x.v,
                attn_mask=attn_mask,
                is_causal=any(isinstance(constraint, Window) for constraint in each_of(self.mask)),
                scale=self.scale,
                enable_gqa=self.H_q > self.H_kv,
            )
            return with_gradients(x, o)
