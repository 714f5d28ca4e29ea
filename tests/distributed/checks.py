"""Checks that run in every process: errors, agreement of the ranks, what is sent and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from transformer_kernels import distributed
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import partial as rectangles
from transformer_kernels.distributed.arguments import Arguments, checked
from transformer_kernels.distributed.peers import Exchange, Peers
from transformer_kernels.masks.mask import Mask
from transformer_kernels.scores.alibi import alibi

# Without types: some calls have invalid arguments.
ring_attention: Any = distributed.ring_attention
all_to_all_attention: Any = distributed.all_to_all_attention
shard_sequence: Any = distributed.shard_sequence
unshard_sequence: Any = distributed.unshard_sequence


def inputs(length: int, heads: int = 2, batch: int = 1, **options: Any) -> list[Tensor]:
    """q, k and v of a shard, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, length, 8, generator=generator).requires_grad_(**options)
        for _ in range(3)
    ]


def check_errors() -> None:
    """Invalid arguments are refused on all ranks, and the next call works."""
    q, k, v = inputs(12)
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (ValueError, "layout must be 'zigzag' or 'contiguous', got 'ring'", {"layout": "ring"}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
        (TypeError, "check must be True or False", {"check": 1}),
        (TypeError, "unexpected keyword argument 'maks'", {"maks": None}),
        (TypeError, "mask must be a Mask or None", {"mask": 1}),
        (ValueError, "backend must be one of", {"backend": "gpu"}),
        (ValueError, "pieces of queries must .* multiple of 16 tokens, got 6", {"dropout_p": 0.5}),
        (ValueError, r"must be \(B, M\) = \(1, 12\)|must be .*12",
         {"mask": Mask.segments(torch.zeros(1, 24).long())}),
        (ValueError, r"must broadcast to \(B, H, M, N\) = \(1, 2, 12, 24\)",
         {"mask": Mask.dense(torch.ones(12, 12).bool())}),
        (ValueError, r"bias must broadcast to \(B, H_q, M, N\) = \(1, 2, 12, 24\)",
         {"bias": torch.zeros(12, 12)}),
    )  # fmt: skip
    for error, message, options in wrong:
        expect(error, message, partial(ring_attention, q, k, v, **options))
    for error, message, call in (
        (ValueError, "share the width D", lambda: ring_attention(q, k[..., :4], v)),
        (ValueError, "pieces of keys must have a multiple of 16 tokens, got 6",
         lambda: ring_attention(inputs(32)[0], k, v, dropout_p=0.5)),
        (ValueError, "the length of q must be a multiple of 4 .* pad the sequence",
         lambda: ring_attention(q[:, :, :3], k, v)),
        (ValueError, "heads must divide over the 2 ranks",
         lambda: all_to_all_attention(q[:, :1], k[:, :1], v[:, :1])),
        (ValueError, "must be a multiple of 4",
         lambda: shard_sequence(torch.zeros(6), dim=0)),
        (ValueError, "dim must be at most 0", lambda: shard_sequence(torch.zeros(8), dim=1)),
        (TypeError, "x must be a tensor", lambda: unshard_sequence([1], dim=0)),
        (RuntimeError, "differentiable once",
         lambda: second_derivative(ring_attention(q, k, v), q)),
    ):  # fmt: skip
        expect(error, message, call)
    assert ring_attention(q, k, v).shape == q.shape


def second_derivative(o: Tensor, q: Tensor) -> None:
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    torch.autograd.grad(dq.sum(), q)


def expect(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert re.search(message, str(raised.value)), f"{message!r} is not in: {raised.value}"


def assert_compiles_alike(layer: Callable[..., Any], leaves: list[Tensor]) -> None:
    """Asserts that compiled code has the same results and gradients."""
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        o = run(*leaves)
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    assert_same_function(*results)


def check_disagreement() -> None:
    """A call that differs on one rank is refused on all of them, which name the difference."""
    rank = dist.get_rank()
    q, k, v = inputs(12)
    longer = inputs(16)
    options: dict[str, dict[str, Any]] = {
        "right=0": {"mask": Mask.causal() if rank else None},
        "left=3": {"mask": Mask.window(4 - rank, 0)},
        r"end=int64 \(1,\) \[9\].*\n.*end=int64 \(1,\) \[10\]": (
            {"mask": Mask.padding(torch.tensor([9 + rank]))}
        ),
        r"BlockSparse\(blocks=bool": (
            {"mask": Mask.block_sparse(torch.ones(3, 3).bool().triu(rank), 8)}
        ),
        "bias: Alibi": {"bias": alibi(torch.ones(2)) if rank else None},
        "layout: 'contiguous'": {"layout": "contiguous" if rank else "zigzag"},
    }
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        *((one, partial(ring_attention, q, k, v, **x)) for one, x in options.items()),
        (r"q: float32 \(1, 2, 16, 8\)", lambda: ring_attention(*(longer if rank else (q, k, v)))),
        (r"scale: 0.5", lambda: all_to_all_attention(q, k, v, scale=0.5 if rank else None)),
        (r"with gradient", lambda: ring_attention(q.detach() if rank else q, k, v)),
        (r"error: .*share the width", lambda: ring_attention(q, k[..., :4] if rank else k, v)),
    )
    for message, call in calls:
        expect(ValueError, "all ranks must make the same call, got", call)
        expect(ValueError, message, call)
    assert ring_attention(q, k, v).shape == q.shape


def check_disagreement_on_a_grid() -> None:
    """A rank in another row and column of the grid is enough."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    q, k, v = inputs(12)
    mask = Mask.window(3 if dist.get_rank() == 3 else 4, 0)
    groups = {"group": mesh.get_group("ring"), "heads_group": mesh.get_group("heads")}
    message = "on 3 of 4 ranks: .*left=4.*\n  on 1 of 4 ranks: .*left=3"
    expect(ValueError, message, lambda: ring_attention(q, k, v, mask=mask, **groups))


def check_one_rank_ends(first: str) -> None:
    """The other ranks raise an error that names it, if it ends before their call or in it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all processes
    dist.barrier()
    time.sleep(0.0 if dist.get_rank() == int(first) else 1.0)
    if dist.get_rank() == 1:
        os._exit(3)
    q, k, v = inputs(12)
    for call in (
        lambda: ring_attention(q, k, v),
        lambda: all_to_all_attention(q, k, v, check=False),
        lambda: unshard_sequence(q, dim=2),
    ):
        expect(RuntimeError, "rank 0 waited for rank 1", call)
    print("rank 0 has named rank 1", flush=True)
    os._exit(0)


def check_one_rank_hangs(seconds: str) -> None:
    """The other ranks raise an error that names it, after the time-out of the group."""
    start = time.monotonic()
    q, k, v = inputs(12)
    o = ring_attention(q, k, v)
    if dist.get_rank() == 1:
        time.sleep(3 * float(seconds))
        os._exit(0)
    expect(RuntimeError, "rank 0 waited for rank 1", lambda: torch.autograd.grad(o.sum(), q))
    assert float(seconds) - 1 < time.monotonic() - start < 2 * float(seconds) + 2
    os._exit(0)


def check_order_of_messages() -> None:
    """Keys of a step are under way before the computation with those of the step before it; in the
    backward pass, gradients of keys too."""
    events: list[str] = []
    exchange, wait = Peers.exchange, Exchange.wait

    def traced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            events.append(name)
            return function(*words, **options)

        return call

    q, k, v = inputs(8, requires_grad=True)
    with (
        mock.patch.object(Peers, "exchange", traced("send", exchange)),
        mock.patch.object(Exchange, "wait", traced("wait", wait)),
        mock.patch.object(rectangles, "forward", traced("compute", rectangles.forward)),
        mock.patch.object(rectangles, "backward", traced("compute", rectangles.backward)),
    ):
        o = ring_attention(q, k, v, layout="contiguous", check=False)
        last = dist.get_world_size() - 1
        assert events == ["send", "compute", "wait"] * last + ["compute"]
        events.clear()
        torch.autograd.grad(o.sum(), (q, k, v))
    expected = ["send", "compute", "wait"]
    for step in range(1, last + 1):
        expected += ["send", "compute"] if step < last else ["compute"]  # keys of the next step
        expected += ["wait", "send"] if step > 1 else ["send"]  # gradients of the keys
        expected += ["wait"]
    assert events == expected


def check_what_is_sent() -> None:
    """Counts of sent elements: only pieces that the receiver sees."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunk, heads, width = 4, 2, 8
    exchange = Peers.exchange
    for mask, layout, pieces in (
        (None, "contiguous", [size - 1] * size),
        (Mask.causal(), "contiguous", [size - 1 - r for r in range(size)]),
        # All others see chunk r, and those before rank r see chunk 2 P - 1 - r.
        (Mask.causal(), "zigzag", [size - 1 + r for r in range(size)]),
        (Mask.window(1, 0), "contiguous", [0.25] * (size - 1) + [0]),  # one key
        (Mask.padding(torch.tensor([1])), "contiguous", [size - 1] + [0] * (size - 1)),
    ):
        length = chunk * (2 if layout == "zigzag" else 1)
        q, k, v = inputs(length, heads, requires_grad=False)
        with mock.patch.object(Peers, "exchange", autospec=True, side_effect=exchange) as calls:
            ring_attention(q, k, v, mask=mask, layout=layout, check=False)
        sent = [x.numel() for call in calls.call_args_list for x in call.kwargs["sent"]]
        elements = 2 * chunk * heads * width * pieces[rank]
        assert sum(sent) == elements, (mask, layout, rank, sum(sent) / (2 * chunk * heads * width))


def check_bits() -> None:
    """Two runs have the same bits, gradients included."""
    q, k, v = inputs(130, 3, 2, requires_grad=True)

    def run() -> list[Tensor]:
        o = ring_attention(q, k, v, mask=Mask.causal())
        return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def check_recomputation() -> None:
    """Under activation checkpointing the gradients, with dropout, have the same bits."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(dist.get_rank())
    q, k, v = inputs(128, requires_grad=True)

    def attend(*qkv: Tensor) -> Any:
        return ring_attention(*qkv, dropout_p=0.4)

    results = []
    for run in (attend, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)):
        torch.manual_seed(7 + dist.get_rank())
        results.append(torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


def check_compile() -> None:
    """Compiled code breaks the graph at the operators and has the same results."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        o = ring_attention(q * 2, k, v, mask=Mask.causal())
        return all_to_all_attention(o.sin(), k, v).cos()

    assert_compiles_alike(layer, inputs(8, requires_grad=True))


def check_autocast() -> None:
    """Under autocast q, k and v are cast, as in `attention`."""
    q, k, v = inputs(8, requires_grad=True)
    expected = ring_attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        o = ring_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected)
    assert torch.autograd.grad(o.float().sum(), q)[0].dtype == torch.float32


def check_seed() -> None:
    """Without a seed, all ranks use that of the first one."""
    torch.manual_seed(dist.get_rank())
    q, k, v = inputs(128)
    peers = Peers.of(None)
    arguments, _ = checked(Arguments(dropout_p=0.4), q, k, v, "zigzag", (peers, peers.alone()))
    assert isinstance(arguments.seed, Tensor)
    seeds = [torch.zeros_like(arguments.seed) for _ in range(dist.get_world_size())]
    dist.all_gather(seeds, arguments.seed)
    assert len({int(seed) for seed in seeds}) == 1


def check_messages() -> None:
    """Checks for any number of processes."""
    check_order_of_messages()
    check_what_is_sent()
    check_bits()
    if dist.get_world_size() == 4:
        check_disagreement_on_a_grid()


def check_others() -> None:
    """Checks that leave the processes alive and are not in the sample of the quick tier."""
    check_seed()
    check_autocast()
    check_compile()
    check_recomputation()
