"""Losses as sums, with the number of what was summed: the sums of parts add up to the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transformer_kernels.nn.options import check_probability


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Cross entropy against smoothed targets: the sum over all targets but padding, and their
    number.

    Of a target y the distribution q gives 1 - smoothing to y, smoothing / (V - 2) to every other
    token, and nothing to `pad`, which nobody is to predict; the loss is -Σ q log softmax(logits).
    It exceeds the divergence KL(q || softmax(logits)), which has the same gradient, by the
    entropy of q:

        -(1 - smoothing) log(1 - smoothing) - smoothing log(smoothing / (V - 2)) for each target

    Without smoothing it is torch's `cross_entropy(ignore_index=pad, reduction="sum")`.

    Args:
        logits: (..., V), any floating dtype; half precision is computed and summed in float32.
        targets: (...) int64, tokens; where they are `pad` they count for nothing.
        smoothing: the share that is taken from the target, at least 0 and below 1.
        pad: the padding token.

    Returns:
        the sum, in nats, a scalar in float32 (float64 for float64), and the number of targets, an
        int64 scalar. Their quotient is the mean; gradients of a batch in parts are exact where the
        sums of the parts are divided by the number of the whole.

    Raises:
        TypeError, ValueError: an argument is not as above. The values of targets are looked at on
            the CPU alone.

    Source: Rethinking the Inception Architecture (Szegedy et al. 2016), 7; Attention Is All You
    Need, 5.4; the share of the padding token follows The Annotated Transformer.
    """
    _check(logits, targets, smoothing, pad)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = nn.functional.log_softmax(logits, dim=-1, dtype=dtype)
    of_target = log_p.gather(-1, targets[..., None])[..., 0]
    losses = -of_target
    if smoothing > 0.0:
        of_others = log_p.sum(dim=-1) - of_target - log_p[..., pad]
        share = smoothing / (logits.shape[-1] - 2)
        losses = (1.0 - smoothing) * losses - share * of_others
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
    least, most = (int(x) for x in targets.aminmax())
    if least < 0 or most >= V:
        wrong = least if least < 0 else most
        raise ValueError(f"targets must be tokens from 0 to {V - 1}, got {wrong}")


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, ignored: int = -100) -> Tensor:
    """Cross entropy in nats, summed over targets but those that are `ignored`.

    logits (..., V), half precision computed and summed in float32; targets (...) int64 -> a scalar.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum"
    )
