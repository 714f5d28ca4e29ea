"""Causal attention against torch's: `kernels benchmark`."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(Benchmark):  # type: ignore[misc]
    """Tensors of flash_attn's layout, (batch, tokens, heads, width)."""

    seed = 0

    def _draw(self, tokens: int) -> None:
        shape = (1, tokens, 8, 64)
        self.qkv = [torch.randn(shape, device=self.device) for _ in range(3)]

    def _attend(self) -> None:
        if hasattr(self.kernel, "flash_attn_func"):
            self.out = self.kernel.flash_attn_func(*self.qkv, causal=True)
        else:  # transformers' interface: heads before tokens
            q, k, v = (x.transpose(1, 2) for x in self.qkv)
            self.out, _ = self.kernel.flash_attn_forward(
                nn.Module(), q, k, v, None, scaling=0.125, dropout=0.0, is_causal=True
            )

    def _expected(self) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.qkv)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def setup_short(self) -> None:
        self._draw(128)

    def benchmark_short(self) -> None:
        self._attend()

    def verify_short(self) -> Tensor:
        return self._expected()

    def setup_long(self) -> None:
        self._draw(2048)

    def benchmark_long(self) -> None:
        self._attend()

    def verify_long(self) -> Tensor:
        return self._expected()
