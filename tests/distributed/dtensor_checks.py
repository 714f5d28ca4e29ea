"""Checks of calls with DTensors, against the same calls with whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

import transformer_kernels as tk
from tests.distributed.checks import expect
from tests.support.operators import FORWARD, operators_run_by
from transformer_kernels.bench.tolerance import assert_same_function

B, H_q, H_kv, M, N, D = 3, 8, 4, 7, 13, 5
LENGTHS = torch.tensor([5, 13, 2])
IDS = torch.arange(B * (M + N)).reshape(B, M + N) // 4 % 2
LAYOUT = torch.arange(H_q * 2 * 4).reshape(H_q, 2, 4) % 5 != 2
ENDS = torch.tensor([0, 3, 7]), torch.tensor([0, 9, 13])

Call = Callable[..., tuple[Tensor, Tensor]]


def with_masks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, slopes: Tensor) -> Any:
    mask = tk.Mask.window(5, 9) & tk.Mask.padding(LENGTHS) & tk.Mask.block_sparse(LAYOUT, 4)
    mask &= tk.Mask.segments(IDS[:, :M], IDS[:, M:]) & tk.Mask.dense(IDS[:, None, :M, None] < 5)
    bias = tk.alibi(slopes)
    return tk.attention(q, k, v, mask=mask, bias=bias, softcap=3.0, sinks=sinks, return_lse=True)


def with_tables(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keys: Tensor, table: Tensor) -> Any:
    relative = tk.relative_keys(keys, table=table, lowest=-2)
    return tk.attention(q, k, v, bias=bias, relative=relative, return_lse=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return tk.attention_varlen(q, k, v, *ENDS, mask=tk.Mask.causal(), return_lse=True)


CALLS: tuple[tuple[Call, tuple[tuple[int, ...], ...]], ...] = (
    (with_masks, ((H_q,), (H_q,))),
    (with_tables, ((1, H_q, M, 1), (H_q, 5, D), (1, 5))),
    (packed, ()),
)
"""Functions of q, k and v and of tensors of these shapes, of which the first may be a DTensor."""


def drawn(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


QKV = drawn([(B, H_q, M, D), (B, H_kv, N, D), (B, H_kv, N, D)])


def results(call: Call, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns o, lse and the gradients of the leaves, as whole tensors."""
    for x in leaves:
        x.requires_grad_()
    o, lse = call(*leaves)
    grads = torch.autograd.grad((o * o).sum() + lse.sin().sum(), leaves)
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in (o, lse, *grads)]


def check_placements(mesh: DeviceMesh, of_qkv: Sequence[Sequence[Placement]]) -> None:
    """Each call, with q, k and v placed so, has the results and gradients of the whole one."""
    is_by_batch = any(p.is_shard(0) for placements in of_qkv for p in placements)
    for call, shapes in CALLS:
        if call is packed and is_by_batch:
            continue
        leaves = QKV + drawn(shapes)
        others = [[Replicate()] * mesh.ndim] if len(leaves) > 3 else []
        placed: list[Tensor] = [
            distribute_tensor(x, mesh, placements)
            for x, placements in zip(leaves, [*of_qkv, *others], strict=False)
        ]
        placed += [x.clone() for x in leaves[len(placed) :]]
        whole = results(call, [x.clone() for x in leaves])
        assert_same_function(results(call, placed), whole)


def check_errors(mesh: DeviceMesh) -> None:
    def placed(placement: Placement, heads: int = 2) -> list[Any]:
        return [distribute_tensor(torch.randn(2, heads, 6, 4), mesh, [placement]) for _ in "qkv"]

    by_batch, by_heads, by_length = placed(Shard(0)), placed(Shard(1)), placed(Shard(2))
    packed_by_length = [x[0].transpose(0, 1) for x in by_length]
    attention: Any = tk.attention
    varlen: Any = tk.attention_varlen
    for error, message, call in (
        (ValueError, r"k must be .* by batch or heads, got Shard\(dim=2\)",
         lambda: attention(by_heads[0], *by_length[1:])),
        (ValueError, "multiple of 2 heads, got 3", lambda: attention(*placed(Shard(1), 3))),
        (ValueError, "dropout_p must be 0", lambda: attention(*by_heads, dropout_p=0.5)),
        (TypeError, "must all be DTensors",
         lambda: attention(*by_heads[:2], torch.ones(2, 2, 6, 4))),
        (ValueError, r"q must be replicated or sharded by heads, got Shard\(dim=2\)",
         lambda: varlen(*packed_by_length, torch.tensor([0, 2, 6]))),
    ):  # fmt: skip
        expect(error, message, call)
    assert operators_run_by(lambda: attention(*by_batch))[FORWARD] == 1


def check_torchs_attention(mesh: DeviceMesh) -> None:
    """`enable()` replaces it."""
    q = QKV[0]
    x = distribute_tensor(q, mesh, [Shard(1)])

    def attend() -> None:
        o: Any = scaled_dot_product_attention(x, x, x, is_causal=True)
        assert_same_function(o.full_tensor(), whole)

    whole = scaled_dot_product_attention(q, q, q, is_causal=True)
    with tk.enabled():
        assert operators_run_by(attend)[FORWARD] == 1


def check_memory_order(mesh: DeviceMesh) -> None:
    """Heads after tokens, as q has them, without a copy; batches of 2 and 1."""
    x = distribute_tensor(QKV[0].transpose(1, 2).contiguous(), mesh, [Shard(0)]).transpose(1, 2)
    o: Any = tk.attention(x, x, x)
    assert o.transpose(1, 2).is_contiguous()
    assert o.placements == (Shard(0),)
    assert o.to_local().transpose(1, 2).is_contiguous()


def check_compiled(mesh: DeviceMesh) -> None:
    """Without a graph break, with gradients."""
    compiled = torch.compile(tk.attention, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in QKV]
    by_heads = [Replicate(), Shard(1)]
    placed: Any = [distribute_tensor(x.detach(), mesh, by_heads).requires_grad_() for x in leaves]
    mask = tk.Mask.window(5, 9)
    whole, o = tk.attention(*leaves, mask=mask), compiled(*placed, mask=mask)
    grads = torch.autograd.grad(whole.sum(), leaves)
    of_placed: Any = torch.autograd.grad(o.sum(), placed)
    assert_same_function(
        [x.full_tensor() for x in (o, *of_placed)], [x.detach() for x in (whole, *grads)]
    )


def check_decode(mesh: DeviceMesh) -> None:
    lengths = torch.tensor([13, 0, 9])
    decode: Any = tk.attention_decode
    whole = decode(*QKV, lengths)
    for placement in (Shard(0), Shard(1)):
        placed = (distribute_tensor(x, mesh, [placement]) for x in QKV)
        o = decode(*placed, lengths)
        assert_same_function(o.full_tensor(), whole)
    k, v, *scales = tk.quantize_cache(*QKV[1:])
    whole = decode(QKV[0], k, v, lengths, k_scale=scales[0], v_scale=scales[1])
    for placement in (Shard(0), Shard(1)):
        placed = (distribute_tensor(x, mesh, [placement]) for x in (QKV[0], k, v))
        k_scale, v_scale = scales[0], distribute_tensor(scales[1], mesh, [placement])
        o = decode(*placed, lengths, k_scale=k_scale, v_scale=v_scale)
        assert_same_function(o.full_tensor(), whole)


def check_sample() -> None:
    mesh = init_device_mesh("cpu", (2,))
    everywhere, by_batch, by_heads = [Replicate()], [Shard(0)], [Shard(1)]
    check_placements(mesh, [by_batch] * 3)
    check_placements(mesh, [by_heads, everywhere, by_heads])
    check_placements(mesh, [everywhere, by_heads, by_batch])
    check_errors(mesh)
    check_torchs_attention(mesh)
    check_memory_order(mesh)
    check_decode(mesh)


def check_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    check_placements(mesh, [[Shard(0), Shard(1)]] * 3)
    check_placements(mesh, [[Shard(1), Shard(1)]] * 3)
    check_placements(mesh, [[Shard(0), Shard(0)]] * 3)
    check_placements(mesh, [[Replicate(), Shard(1)]] * 3)
    check_compiled(mesh)
