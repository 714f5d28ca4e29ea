"""Who is measured: naive attention, torch's ways, and each of our fused backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels.backends import CudaBackend, TritonBackend
from transformer_kernels.backends.native import extension
from transformer_kernels.backends.native.cuda import HOPPER_SWITCH
from transformer_kernels.backends.native.cuda_support import runs_hopper
from transformer_kernels.bench.cases import SEED, Attend, Case, refuse_options
from transformer_kernels.bench.flex import flex
from transformer_kernels.bench.provenance import CPU
from transformer_kernels.functional.attention import attention
from transformer_kernels.masks.mask import Mask
from transformer_kernels.scores import philox


@dataclass(frozen=True)
class Variant:
    """A way to compute attention. `bind` does what a user does once, such as making the mask."""

    name: str
    label: str
    """For tables and pictures"""
    bind: Callable[[Case], Attend]
    unavailable_reason: Callable[[], str | None] = lambda: None
    devices: tuple[str, ...] = ("cpu",)
    """The types of those it runs on"""
    is_peer: bool = True
    """Not ours: where it cannot run a case it is left out, and its reason told"""


def _naive(case: Case) -> Attend:
    shown = _bool_mask(case)
    hidden = None if shown is None else ~shown
    factor = _dropout_factor(case) if case.dropout_p else None
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
    """Attention as models write it out by hand, with no line more than it needs.

    Everything is rounded to q's dtype; a row with no visible key gives NaN. `factor` multiplies the
    weights, as dropout does.
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


def _dropout_factor(case: Case) -> Tensor:
    """(B, H_q, M, N), of our own bits: torch's would not give comparable results."""
    seed = torch.tensor(SEED, device=case.device)
    kept = philox.keep_mask(seed, case.B, case.H_q, case.M, case.N, case.dropout_p)
    return (kept / (1.0 - case.dropout_p)).to(case.dtype)


def _sdpa(case: Case) -> Attend:
    refuse_options("torch's SDPA", case)
    if case.mask is not None and case.mask.constraints == Mask.causal().constraints:
        return lambda q, k, v: _torch_sdpa(q, k, v, is_causal=True)
    shown = _bool_mask(case)
    return lambda q, k, v: _torch_sdpa(q, k, v, attn_mask=shown)


def _sdpa_by(kernel: SDPBackend) -> Callable[[Case], Attend]:
    """One of the kernels that SDPA chooses from; RuntimeError, when called, where it cannot."""

    def bind(case: Case) -> Attend:
        attend = _sdpa(case)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return attend(q, k, v)

        return call

    return bind


def _torch_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=grouped
    )


def ours(backend: str) -> Callable[[Case], Attend]:
    """`Variant.bind` of one of our backends."""

    def bind(case: Case) -> Attend:
        seed = SEED if case.dropout_p else None
        return lambda q, k, v: attention(
            q, k, v,
            mask=case.mask, bias=case.bias, dropout_p=case.dropout_p, seed=seed, backend=backend,
        )  # fmt: skip

    return bind


def _bool_mask(case: Case) -> Tensor | None:
    """(B, 1, M, N); made once, so that nobody's time includes it."""
    if case.mask is None:
        return None
    return case.mask.materialize(case.B, 1, case.M, case.N, case.device)


def _why_no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _why_no_cuda_kernels() -> str | None:
    return _why_no_cuda() or CudaBackend().unavailable_reason()


def _why_not_sm80() -> str | None:
    if (reason := _why_no_cuda_kernels()) is not None:
        return reason
    if runs_hopper(torch.device("cuda")):
        return f"this GPU has cuda_sm90, unless {HOPPER_SWITCH}=0"
    return None


def _why_not_sm90() -> str | None:
    if (reason := _why_no_cuda_kernels()) is not None:
        return reason
    has = runs_hopper(torch.device("cuda"))
    return None if has else "the GPU is not Hopper's, or the kernels for it are not built"


def _why_no_triton() -> str | None:
    return _why_no_cuda() or TritonBackend().unavailable_reason()


EVERYWHERE = ("cpu", "cuda")
CUDA = ("cuda",)

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("naive", "naive bmm", _naive, devices=EVERYWHERE),
        Variant("sdpa", "torch SDPA", _sdpa, devices=EVERYWHERE),
        *(
            Variant(f"sdpa_{name}", f"SDPA, {name}", _sdpa_by(kernel), _why_no_cuda, CUDA)
            for name, kernel in (
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("efficient", SDPBackend.EFFICIENT_ATTENTION),
            )
        ),
        Variant("flex", "FlexAttention", flex, _why_no_cuda, CUDA),
        Variant("cpu", "fused (cpu)", ours("cpu"), extension.unavailable_reason, is_peer=False),
        # One backend: which of its kernels run depends on the GPU, and little on the case.
        *(
            Variant(f"cuda_{name}", f"fused (cuda, {name})", ours("cuda"), why, CUDA, is_peer=False)
            for name, why in (("sm80", _why_not_sm80), ("sm90", _why_not_sm90))
        ),
        Variant("triton", "fused (triton)", ours("triton"), _why_no_triton, CUDA, is_peer=False),
    )
}  # fmt: skip


def usable_variants(names: Iterable[str] = VARIANTS, device: torch.device = CPU) -> list[Variant]:
    """The named variants that can run here on such a device. ValueError for a name that is none."""
    chosen = []
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"a variant is one of {', '.join(VARIANTS)}, got {name!r}")
        variant = VARIANTS[name]
        if device.type in variant.devices and variant.unavailable_reason() is None:
            chosen.append(variant)
    return chosen
