"""Checks of `context_parallel` that run in every process: models, divided, against undivided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import transformer_kernels as tk
from tests.distributed.checks import expect
from transformer_kernels import distributed
from transformer_kernels.distributed import ContextParallel
from transformer_kernels.masks.mask import Mask
from transformer_kernels.models.bert import Bert, BertConfig
from transformer_kernels.models.gpt2 import GPT2, GPT2Config
from transformer_kernels.models.t5 import T5, T5Config
from transformer_kernels.nn.blocks import TransformerBlock, recompute_blocks

context_parallel: Any = distributed.context_parallel  # some calls have invalid arguments

B, T, VOCABULARY = 2, 24, 31
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "layers": 2, "width": 16, "dropout": 0.0}
BOUND = 1e-12

Run = Callable[[ContextParallel | None], Tensor]
"""Outputs by token, (B, T or T / P, ...), of the undivided model or of this rank's tokens."""


def assert_equal_to_undivided(
    model: nn.Module, run: Run, mesh: Any = None, bound: float = BOUND, **options: Any
) -> None:
    """Compares outputs by token and all gradients of a loss that is a sum over tokens.

    The backward pass is outside of the context.
    """
    expected = run(None)
    weights = torch.linspace(-1.0, 1.0, expected.numel(), dtype=expected.dtype).view_as(expected)
    (expected * weights).sum().backward()
    wanted = [taken_gradient(p) for p in model.parameters()]
    with context_parallel(mesh, **options) as context:
        o = run(context)
    (o * context.shard(weights, 1)).sum().backward()
    assert_close("outputs", context.unshard(o, 1), expected, bound)
    for (name, p), gradient in zip(model.named_parameters(), wanted, strict=True):
        share = taken_gradient(p)
        assert (share is None) == (gradient is None), name
        if share is not None and gradient is not None:
            dist.all_reduce(share)
            assert_close(name, share, gradient, bound)


def taken_gradient(p: nn.Parameter) -> Tensor | None:
    gradient, p.grad = p.grad, None
    return gradient


def assert_close(name: str, got: Any, wanted: Any, bound: float = BOUND) -> None:
    error = float((got - wanted).detach().abs().max())
    assert error <= bound * max(1.0, float(wanted.detach().abs().max())), (name, error)


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def own(context: ContextParallel | None, x: Tensor) -> Tensor:
    return x if context is None else context.shard(x, 1)


def gpt2() -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(**SIZES, heads=4, context=T)).double()


def check_switch() -> None:
    """A model in the context, and errors."""
    model, text = gpt2(), tokens(B, T)
    assert_equal_to_undivided(model, lambda context: model(own(context, text)))
    check_refusals()


def check_methods() -> None:
    """The methods and layouts, with activation checkpointing or without."""
    model, text = gpt2(), tokens(B, T)
    for method, layout in (("ring", "zigzag"), ("ring", "contiguous"), ("all_to_all", "zigzag")):
        for recompute in (False, True):
            recompute_blocks(model, recompute)
            assert_equal_to_undivided(
                model, lambda context: model(own(context, text)), method=method, layout=layout
            )


def check_compile() -> None:
    """Compiled code is compiled anew for the context, once."""
    model, text = gpt2(), tokens(B, T)
    compiled: Any = torch.compile(model, backend="aot_eager")
    assert_equal_to_undivided(model, lambda context: compiled(own(context, text)))
    with torch.compiler.set_stance("fail_on_recompile"):  # a context for each step
        for _ in range(2):
            assert_equal_to_undivided(model, lambda context: compiled(own(context, text)))


def check_mesh() -> None:
    """A grid of processes: a ring, and heads that are exchanged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    model, text = gpt2(), tokens(B, T)
    assert_equal_to_undivided(model, lambda context: model(own(context, text)), mesh)


def check_modules() -> None:
    """Encoders with padding, whose embedding is NaN, relative positions, and cross-attention."""
    torch.manual_seed(0)
    lengths = torch.tensor([T - 7, T])
    sizes = SIZES | {"heads": 2, "hidden": 32}
    bert = Bert(BertConfig(**sizes, context=T)).double()
    t5 = T5(T5Config(**sizes, decoder_layers=2, head_size=8, tied_embeddings=False)).double()
    for model in (bert, t5):
        nn.init.constant_(model.embedding.weight[0], torch.nan)
    visible = torch.arange(T) < lengths[:, None]
    text, source = 1 + tokens(B, T) % (VOCABULARY - 1), 1 + tokens(B, 2 * T) % (VOCABULARY - 1)
    padded = text.where(visible, 0)
    source = source.where(visible.repeat_interleave(2, 1), 0)

    def encode(context: ContextParallel | None) -> Tensor:
        y: Tensor = bert(own(context, padded), lengths=lengths)
        return y * own(context, visible)[..., None]

    assert_equal_to_undivided(bert, encode)
    assert_equal_to_undivided(t5, lambda c: t5(own(c, source), own(c, text), 2 * lengths))


def check_data_parallel() -> None:
    """DistributedDataParallel and FSDP2 average the gradients of a divided model over ranks."""
    text, size = tokens(B, T), dist.get_world_size()
    reference = gpt2()
    (reference(text).square().sum() / text.numel()).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for wrapped in (DistributedDataParallel, fsdp):
        model = gpt2()
        runner = wrapped(model)
        with context_parallel() as context:
            logits = runner(context.shard(text, 1))
            (logits.square().sum() * size / text.numel()).backward()
        for name, p in model.named_parameters():
            gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert_close(name, gradient, wanted[name])


def fsdp(model: GPT2) -> nn.Module:
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_recomputation_outside() -> None:
    """A backward pass that would recompute undivided attention is refused."""
    block = TransformerBlock(16, 2).double()
    x = torch.randn(B, T, 16, dtype=torch.float64)
    for method in ("ring", "all_to_all"):
        with context_parallel(method=method) as context:
            own_x = context.shard(x, 1).requires_grad_()
            o = torch.utils.checkpoint.checkpoint(block, own_x, use_reentrant=False)
        expect(torch.utils.checkpoint.CheckpointError, "ecomputed|number", o.sum().backward)


def check_sdpa() -> None:
    """torch's scaled_dot_product_attention under `enable()`, in compiled code and modules too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).double()
    x = torch.randn(B, T, 16, dtype=torch.float64)
    visible = torch.rand(T, T) < 0.5

    def attention(x: Tensor, mask: Tensor | None) -> Tensor:
        head = x[:, None]
        is_causal = mask is None
        o = functional.scaled_dot_product_attention(head, head, head, mask, 0.0, is_causal)
        return o[:, 0]

    def masked(context: ContextParallel | None) -> Tensor:
        mask = visible if context is None else context.shard(visible, 0)
        return attention(leaf(own(context, x)), mask)

    with tk.enabled():
        assert_equal_to_undivided(nn.Module(), lambda c: attention(leaf(own(c, x)), None))
        assert_equal_to_undivided(nn.Module(), masked)
        compiled: Any = torch.compile(attention, backend="aot_eager")
        assert_equal_to_undivided(nn.Module(), lambda c: compiled(leaf(own(c, x)), None))
        assert_equal_to_undivided(layer, lambda c: layer(own(c, x)))
        layer.eval()
        with torch.no_grad(), context_parallel() as context:
            expected = context.unshard(layer(context.shard(x, 1)), 1)
        with torch.no_grad():
            assert_close("inference", layer(x), expected)
        with context_parallel() as context:
            part = context.shard(x, 1)
            expect(ValueError, "must broadcast", lambda: attention(part, visible[:4, :4]))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                expect(ValueError, "torch's own attention", lambda: attention(part, None))


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def check_refusals() -> None:
    """Functions that cannot run on shards raise an error, and invalid arguments do."""
    q = torch.randn(1, 2, 8, 4)
    rows, cu_seqlens = q[0].transpose(0, 1), torch.tensor([0, 8])
    sdpa = TransformerBlock(16, 2, attn_implementation="sdpa")
    with context_parallel():
        for name, call in (
            ("attention_varlen", lambda: tk.attention_varlen(rows, rows, rows, cu_seqlens)),
            ("attention_decode", lambda: tk.attention_decode(q, q, q, torch.tensor([8]))),
            ("attention_weights", lambda: tk.attention_weights(q, q, rows=[3])),
            ("linear_attention", lambda: tk.linear_attention(q, q, q)),
            ("explain", lambda: tk.explain(q, q, q)),
            ("attn_implementation='sdpa'", lambda: sdpa(torch.randn(1, 8, 16))),
        ):
            expect(ValueError, f"{name} does not run on a divided sequence", call)
    assert torch.equal(tk.attention(q, q, q), tk.attention(q, q, q, mask=Mask()))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size(), 1))
    for error, message, call in (
        (TypeError, "mesh must be a DeviceMesh", lambda: enter("cpu")),
        (ValueError, "mesh must have one dimension", lambda: enter(mesh)),
        (ValueError, "method must be", lambda: enter(None, method="both")),
        (ValueError, "layout must be", lambda: enter(None, layout="ring")),
        (TypeError, "check must be", lambda: enter(None, check=1)),
    ):
        expect(error, message, call)


def enter(mesh: Any, **options: Any) -> None:
    with context_parallel(mesh, **options):
        pass


def check_everything() -> None:
    """All checks for two processes, in one launch."""
    check_methods()
    check_compile()
    check_modules()
    check_data_parallel()
    check_recomputation_outside()
    check_sdpa()
