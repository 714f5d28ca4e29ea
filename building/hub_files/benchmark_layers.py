"""The gated delta rule against a loop over the tokens: `kernels benchmark`."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark
from torch import Tensor
from torch.nn.functional import conv1d, normalize, pad, silu


class LinearLayer(Benchmark):  # type: ignore[misc]
    """A layer of 8 heads, with 512 tokens."""

    seed = 0

    def setup_delta_rule(self) -> None:
        q, k, v = (torch.randn(1, 512, 8, 64, device=self.device) for _ in range(3))
        g, beta = (torch.rand(1, 512, 8, device=self.device) for _ in range(2))
        self.inputs = normalize(q, dim=-1), normalize(k, dim=-1), v, -g, beta

    def benchmark_delta_rule(self) -> None:
        self.out, _ = self.kernel.layers.chunk_gated_delta_rule()(*self.inputs)

    def verify_delta_rule(self) -> Tensor:
        q, k, v, g, beta = self.inputs
        S, rows = torch.zeros(1, 8, 64, 64, device=self.device), []
        for t in range(512):
            S = S * g[:, t].exp()[..., None, None]
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
            rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t] / 8, S))
        return torch.stack(rows, dim=1)

    def setup_convolution(self) -> None:
        self.x = torch.randn(1, 1536, 512, device=self.device)
        self.weight = torch.randn(1536, 4, device=self.device)

    def benchmark_convolution(self) -> None:
        self.out = self.kernel.layers.causal_conv1d_fn()(self.x, self.weight, activation="silu")

    def verify_convolution(self) -> Tensor:
        return silu(conv1d(pad(self.x, (3, 0)), self.weight[:, None], groups=1536))
