"""Variants to compare: naive attention, torch's implementations and our fused backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..backends import CudaBackend, TritonBackend
from ..backends.native import extension
from ..backends.native.cuda import HOPPER_SWITCH
from ..backends.native.cuda_support import runs_hopper
from ..functional.attention import attention
from ..masks.mask import Mask
from ..scores import philox
from . import peers
from .cases import SEED, Attend, Case, check_no_options
from .provenance import CPU


@dataclass(frozen=True)
class Variant:
    """One implementation of attention.

    `attend_for` does the set-up that a user does once per case, such as building the mask, and
    returns the function to measure.
    """

    name: str
    label: str
    """name in tables and figures"""
    attend_for: Callable[[Case], Attend]
    unavailable_reason: Callable[[], str | None] = lambda: None
    devices: tuple[str, ...] = ("cpu",)
    """device types it runs on"""
    is_peer: bool = True
    """True if it is not ours. A peer that cannot run a case is skipped and its reason reported."""


def _naive(case: Case) -> Attend:
    visible, factor = _bool_mask(case), None
    hidden = None if visible is None else ~visible
    if case.dropout_p:
        # From our own bits: with torch's, results would differ.
        seed = torch.tensor(SEED, device=case.device)
        kept = philox.keep_mask(seed, case.B, case.H_q, case.M, case.N, case.dropout_p)
        factor = (kept * philox.keep_factor(case.dropout_p)).to(case.dtype)
    return lambda q, k, v: naive_attention(q, k, v, hidden, bias=case.bias, factor=factor)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    *,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Attention as models write it by hand: matmul, softmax, matmul.

    Every intermediate is rounded to q's dtype. A fully masked row gives NaN.

    Args:
        q: (B, H_q, M, D).
        k: (B, H_kv, N, D).
        v: (B, H_kv, N, D_v).
        hidden: bool, broadcastable to (B, H_q, M, N), True = masked; or None.
        bias: added to the scores, broadcastable to (B, H_q, M, N).
        factor: multiplies the weights, as dropout does; (B, H_q, M, N).

    Returns:
        o, (B, H_q, M, D_v).
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias
    if hidden is not None:
        s = s.masked_fill(hidden, float("-inf"))
    p = s.softmax(dim=-1)
    if factor is not None:
        p = p * factor
    return torch.matmul(p, v)


def _sdpa(case: Case) -> Attend:
    check_no_options("torch's SDPA", case)
    is_causal = case.mask is not None and case.mask.constraints == Mask.causal().constraints
    attn_mask = None if is_causal else _bool_mask(case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=grouped
        )

    return attend


def _sdpa_by(kernel: SDPBackend) -> Callable[[Case], Attend]:
    """`Variant.attend_for` of one kernel of SDPA; calls raise RuntimeError if it is unsupported."""

    def attend_for(case: Case) -> Attend:
        attend = _sdpa(case)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return attend(q, k, v)

        return call

    return attend_for


def ours(backend: str) -> Callable[[Case], Attend]:
    """`Variant.attend_for` of one of our backends."""

    def attend_for(case: Case) -> Attend:
        seed = SEED if case.dropout_p else None
        return lambda q, k, v: attention(
            q, k, v,
            mask=case.mask, bias=case.bias, dropout_p=case.dropout_p, seed=seed, backend=backend,
        )  # fmt: skip

    return attend_for


def _bool_mask(case: Case) -> Tensor | None:
    """Mask as bool (B, 1, M, N), built once per case and not part of any time."""
    if case.mask is None:
        return None
    return case.mask.materialize(case.B, 1, case.M, case.N, case.device)


# Reasons why a variant is unavailable, or None.


def _cuda_reason() -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _family_reason(family: str) -> str | None:
    """The GPU decides which of the two kernel families of the backend "cuda" runs."""
    if (reason := _cuda_reason() or CudaBackend().unavailable_reason()) is not None:
        return reason
    if runs_hopper(torch.device("cuda")):
        switch = f"this GPU runs cuda_sm90; set {HOPPER_SWITCH}=0 to measure cuda_sm80"
        return None if family == "sm90" else switch
    missing = "the GPU is not a Hopper GPU, or the sm90 kernels are not built"
    return None if family == "sm80" else missing


def _triton_reason() -> str | None:
    return _cuda_reason() or TritonBackend().unavailable_reason()


EVERYWHERE = ("cpu", "cuda")
CUDA = ("cuda",)

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("naive", "naive bmm", _naive, devices=EVERYWHERE),
        Variant("sdpa", "torch SDPA", _sdpa, devices=EVERYWHERE),
        *(
            Variant(f"sdpa_{name}", f"SDPA, {name}", _sdpa_by(kernel), _cuda_reason, CUDA)
            for name, kernel in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("efficient", SDPBackend.EFFICIENT_ATTENTION),
            )
        ),
        Variant("flex", "FlexAttention", peers.flex, _cuda_reason, CUDA),
        *(
            Variant(name, name, attend_for, partial(peers.missing_reason, name), CUDA)
            for name, attend_for in peers.PEERS.items()
        ),
        Variant("cpu", "fused (cpu)", ours("cpu"), extension.unavailable_reason, is_peer=False),
        *(
            Variant(
                f"cuda_{family}", f"fused (cuda, {family})", ours("cuda"),
                partial(_family_reason, family), CUDA, is_peer=False,
            )
            for family in ("sm80", "sm90")
        ),
        Variant("triton", "fused (triton)", ours("triton"), _triton_reason, CUDA, is_peer=False),
    )
}  # fmt: skip


def usable_variants(names: Iterable[str] = VARIANTS, device: torch.device = CPU) -> list[Variant]:
    """Returns the named variants that can run on this machine and device.

    Raises:
        ValueError: a name is not in VARIANTS.
    """
    chosen = []
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"names: expected variants of {', '.join(VARIANTS)}, got {name!r}")
        variant = VARIANTS[name]
        if device.type in variant.devices and variant.unavailable_reason() is None:
            chosen.append(variant)
    return chosen
