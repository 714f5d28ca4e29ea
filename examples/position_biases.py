"""Position biases: T5's table and ALiBi's slopes, trained.

A position bias depends on the distance of query and key alone. Kept as a tensor it takes H x M x N
numbers, and its gradient as many again. `relative_bias` takes a table of one number for each
distance, `alibi` a slope for each head; the kernels form the bias from them and sum its gradient
along the diagonals. No M x N memory is used, and fused training of both runs on a CPU, too.

The task shows that the gradients are right. With q = 0 the bias alone decides the weights. Outputs
are made with a hidden table and hidden slopes, and training finds both. T5's buckets are a table as
well: `nn.BucketedBias` of this package makes it.

    $ python examples/position_biases.py
    step 0, loss 2.7e-01
    step 100, loss 3.7e-05
    step 200, loss 1.7e-06
    step 300, loss 5.0e-07
    slopes [0.4999999403953552, 0.1999998539686203, 0.09999968856573105, 0.050765931606292725]
    table: largest error 1.1e-02
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from transformer_kernels import Mask, alibi, attention, relative_bias

HEADS, LENGTH, WIDTH, DISTANCES = 4, 128, 32, 8


def biased(v: Tensor, *, table: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """Causal attention whose weights come from the bias alone."""
    q = torch.zeros_like(v)
    relative = relative_bias(table, lowest=0) if table is not None else None
    bias = alibi(slopes) if slopes is not None else None
    return attention(q, q, v, mask=Mask.causal(), relative=relative, bias=bias)


def main() -> None:
    torch.manual_seed(0)
    # A distance of DISTANCES - 1 or more has the last number of the table.
    true_table = torch.randn(HEADS, DISTANCES)
    true_slopes = torch.tensor([0.5, 0.2, 0.1, 0.05])
    table = nn.Parameter(torch.zeros(HEADS, DISTANCES))
    log_slopes = nn.Parameter(torch.zeros(HEADS))  # slopes stay positive
    optimizer = torch.optim.Adam([table, log_slopes], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=300)

    for step in range(301):
        v = torch.randn(4, HEADS, LENGTH, WIDTH)
        loss = mse_loss(biased(v, table=table), biased(v, table=true_table))
        loss = loss + mse_loss(biased(v, slopes=log_slopes.exp()), biased(v, slopes=true_slopes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.1e}")

    # A constant added to all distances has no effect on weights.
    found, expected = (t - t.mean(1, keepdim=True) for t in (table.detach(), true_table))
    print(f"slopes {log_slopes.exp().tolist()}")
    print(f"table: largest error {(found - expected).abs().max().item():.1e}")
    torch.testing.assert_close(log_slopes.exp().detach(), true_slopes, rtol=0.02, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


if __name__ == "__main__":
    main()
