"""FlexAttention masks: trained on a CPU.

torch's FlexAttention has no backward pass on CPUs. `Mask.from_block_mask` takes the `BlockMask` of
existing code, and `attention` with that mask is differentiable. The result is a dense mask, with a
block mask that skips hidden blocks. If memory matters, a mask of the same pairs can be made of
`Mask.positions`, `Mask.intervals` and the others, which take a few numbers for each token.

    $ python examples/flex_masks.py
    torch, dense mask: forward and backward 53 ms
    BlockMask, converted: forward and backward 17 ms
    intervals: forward and backward 18 ms
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from transformer_kernels import Mask, attention

LENGTH, PREFIX, WINDOW = 1024, 200, 128


def prefix_and_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Shows a prefix to all queries, and to each one the keys of a causal window."""
    return (k < PREFIX) | ((k <= q) & (q - k < WINDOW))


def without_tensor() -> Mask:
    """Returns the same mask, as hidden intervals of keys.

    Hidden are the keys from the end of the prefix to the start of the query's window, and those
    after the query that are not in the prefix.
    """
    i = torch.arange(LENGTH)[None]
    gap = Mask.intervals(torch.full_like(i, PREFIX), i - WINDOW, k_pos=i, inside=False)
    return gap & Mask.prefix_lm(torch.tensor([PREFIX]), length=LENGTH)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, LENGTH, 64, requires_grad=True) for _ in range(3))
    sizes = (None, None, LENGTH, LENGTH)
    converted = Mask.from_block_mask(create_block_mask(prefix_and_window, *sizes, device="cpu"))
    dense = create_mask(prefix_and_window, *sizes, device="cpu")
    intervals = without_tensor()
    calls = {
        "torch, dense mask": lambda: scaled_dot_product_attention(q, k, v, dense),
        "BlockMask, converted": lambda: attention(q, k, v, mask=converted),
        "intervals": lambda: attention(q, k, v, mask=intervals),
    }
    expected = torch.autograd.grad(calls["torch, dense mask"]().square().sum(), [q, k, v])
    for name, call in calls.items():
        gradients = torch.autograd.grad(call().square().sum(), [q, k, v])
        torch.testing.assert_close(gradients, expected)
        step = Timer(
            "call().sum().backward()", globals=locals(), num_threads=torch.get_num_threads()
        ).timeit(5)
        print(f"{name}: forward and backward {step.mean * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
