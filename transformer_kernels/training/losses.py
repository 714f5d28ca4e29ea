"""Losses as sums with their number of terms, so that micro-batches add up to the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn.options import check_probability


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy, summed over all targets except padding.

    The smoothed distribution q of a target y is 1 - smoothing for y, 0 for `pad`, and
    smoothing / (V - 2) for every other token. The loss of a target is -Σ q log softmax(logits). It
    exceeds KL(q || softmax(logits)), which has the same gradient, by the entropy of q:

        -(1 - smoothing) log(1 - smoothing) - smoothing log(smoothing / (V - 2))

    Without smoothing it equals torch's `cross_entropy(ignore_index=pad, reduction="sum")`.

    Args:
        logits: (..., V), any floating dtype; half precision is computed and summed in float32.
        targets: (...) int64, tokens; targets equal to `pad` are ignored.
        smoothing: probability mass moved away from the target, at least 0 and below 1.
        pad: the padding token.

    Returns:
        the sum in nats, a float32 scalar (float64 for float64 logits), and the number of targets,
        an int64 scalar. Their quotient is the mean. For exact gradients over micro-batches, divide
        the sum of each by the number of targets of the whole batch.

    Raises:
        TypeError, ValueError: an argument is not as above. Values of targets are checked only on
            the CPU.

    Source: Rethinking the Inception Architecture (Szegedy et al. 2016), section 7; Attention Is All
    You Need, section 5.4; excluding the padding token follows The Annotated Transformer.
    """
    _check(logits, targets, smoothing, pad)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = nn.functional.log_softmax(logits, dim=-1, dtype=dtype)
    target_log_p = log_p.gather(-1, targets[..., None])[..., 0]
    losses = -target_log_p
    if smoothing > 0.0:
        other_log_p = log_p.sum(dim=-1) - target_log_p - log_p[..., pad]
        share = smoothing / (logits.shape[-1] - 2)
        losses = (1.0 - smoothing) * losses - share * other_log_p
    counts = targets != pad
    return losses.masked_fill(~counts, 0.0).sum(), counts.sum()


def _check(logits: Tensor, targets: Tensor, smoothing: float, pad: int) -> None:
    check_probability("smoothing", smoothing)
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be of a floating dtype, got {logits.dtype}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if logits.dim() == 0 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            "logits must be (..., V) and targets (...), "
            f"got shapes {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    V = logits.shape[-1]
    if smoothing > 0.0 and V < 3:
        raise ValueError(f"logits must have at least 3 tokens to smooth over, got {V}")
    if not 0 <= pad < V:
        raise ValueError(f"pad must be a token from 0 to {V - 1}, got {pad}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or not targets.numel():
        return
    smallest, largest = (int(x) for x in targets.aminmax())
    if smallest < 0 or largest >= V:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"targets must be tokens from 0 to {V - 1}, got {wrong}")


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, ignored: int = -100) -> Tensor:
    """Cross entropy in nats, summed over all targets except those equal to `ignored`.

    Args:
        logits: (..., V); half precision is computed and summed in float32.
        targets: (...) int64.
        ignored: target value that is not counted.

    Returns:
        a scalar, float32 (float64 for float64 logits).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum"
    )
