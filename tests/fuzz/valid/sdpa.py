"""Valid calls of `scaled_dot_product_attention`, direct and in place of torch's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.fuzz.valid.attention import Attention
from tests.fuzz.valid.base import with_gradients
from tests.fuzz.valid.draw import LIMITS, dense_mask, lengths, rarely, shared
from tests.fuzz.valid.masks import Constraint, Dense, Window
from transformer_kernels.integrations.torch_sdpa import scaled_dot_product_attention
from transformer_kernels.integrations.torch_switch import enabled


@dataclass(frozen=True, kw_only=True, repr=False)
class Sdpa(Attention):
    """`mask` is a dense mask, a causal one, both or none; a bias is passed as attn_mask."""

    replaced: bool = False
    """True to call torch's function inside `enabled()`"""

    def results(self) -> dict[str, Tensor]:
        x = self._inputs(hidden=self.hidden)
        for name, tensor in x.items():
            tensor.requires_grad_(name in self.requires_grad)
        attn_mask = x.get("bias")
        for constraint in self.mask:
            if isinstance(constraint, Dense):
                attn_mask = constraint.attn_mask(self.sizes)
        call = functional.scaled_dot_product_attention
        with enabled() if self.replaced else nullcontext():
            o = (call if self.replaced else scaled_dot_product_attention)(
                x["q"],
                x["k"],
                x["v"],
                attn_mask=attn_mask,
                is_causal=any(isinstance(constraint, Window) for constraint in self.mask),
                scale=self.scale,
                enable_gqa=self.group > 1,
            )
            return with_gradients(o, x, self._do(), self._dlse())


@st.composite
def sdpa_calls(draw: st.DrawFn) -> Sdpa:
    limits = LIMITS["cpu"]
    fields = shared(draw, "cpu") | {"softcap": None, "sinks": False}
    M, N = draw(lengths(limits)), draw(lengths(limits))
    mask: tuple[Constraint, ...] = (Window(right=0),) if draw(st.booleans()) else ()
    kind = draw(st.sampled_from([None, "mask", "bias"]))
    if kind == "mask":
        mask = (dense_mask(draw), *mask)
    if kind == "bias":
        fields["bias"] = draw(st.sampled_from(["mn", "bhmn", "n", "hn", "bm", ""]))
        fields["bias_hides"] = rarely(draw)
    names = ("q", "k", "v", "bias") if kind == "bias" else ("q", "k", "v")
    return Sdpa(
        B=draw(st.integers(1, 3)),
        M=M,
        N=N,
        mask=mask,
        hidden=draw(st.booleans()),
        requires_grad=draw(st.sampled_from([(), names, ("q",), ("k", "v")])),
        replaced=draw(st.booleans()),
        **fields,
    )
