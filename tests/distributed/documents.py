"""Checks of divided documents that run in every process, against `attention_varlen`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tests.distributed.checks import assert_compiles_alike, expect
from tests.support.attention import Inputs, with_gradients
from tests.support.case import Outputs
from tests.support.masks import CAUSAL, CAUSAL_END, Window
from tests.support.runtime import poisoned_memory
from tests.support.varlen_cases import VarlenCase
from transformer_kernels import distributed
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.mask import Mask

# Without types: some calls have invalid arguments.
ring_attention_varlen: Any = distributed.ring_attention_varlen
shard_documents: Any = distributed.shard_documents
unshard_documents: Any = distributed.unshard_documents


def case_of(name: str, *lengths: int, **options: Any) -> VarlenCase:
    pairs = tuple((length, length) for length in lengths)
    return VarlenCase(name=name, lengths=pairs, **options)


MANY = (333, 0, 1, 2, 5, 17, 64, 100, 3, 0, 129, 1, 1, 31)
CASES: tuple[VarlenCase, ...] = (
    case_of(
        "everything", *MANY, mask=Window(40, 3), softcap=1.5, scale=0.4, sinks=True,
        H_q=4, D=24, D_v=33, trailing=(7, 7), dlse=True,
    ),
    case_of("causal", *MANY, mask=CAUSAL, dlse=True),
    case_of("full", *MANY, trailing=(70, 70), dlse=True),
    case_of("causal-end", 100, 5, mask=CAUSAL_END, H_q=6, H_kv=1),
    case_of("window", *MANY, mask=Window(9, -2), sinks=True, dlse=True),
    case_of("to-the-left", *MANY, mask=Window(9, None)),
    case_of("windows", 64, 200, mask=(Window(30, 7), CAUSAL)),
    case_of("hidden", 20, 9, mask=Window(-3, -3), sinks=True, dlse=True),
    case_of("nothing-visible", 20, 9, mask=Window(-3, 2), dlse=True),
    case_of("softcap", 70, 3, 129, softcap=2.0, mask=CAUSAL, trailing=(1, 1)),
    case_of("sinks", 33, 1, 1, 64, sinks=True, D_v=8, trailing=(9, 9)),
    case_of("short", *(n % 7 for n in range(60)), mask=CAUSAL, H_q=4),
    case_of("one-token", 1, mask=CAUSAL, dlse=True),
    case_of("no-tokens", 0, 0, trailing=(5, 5), sinks=True, dlse=True),
    case_of("nothing", 0, 0),
)  # fmt: skip


def check_cases(step: str, group: dist.ProcessGroup | None = None) -> None:
    """Compares every `step`-th case with the undivided call."""
    for case in CASES[:: int(step)]:
        try:
            with poisoned_memory():
                _check_case(case, group)
        except Exception as error:
            error.add_note(f"case {case.name}")
            raise


def _check_case(case: VarlenCase, group: dist.ProcessGroup | None) -> None:
    # Trailing padding holds NaN, which no result may depend on.
    x = case.inputs(torch.float64)
    cu_seqlens = torch.tensor(case.starts[0], dtype=torch.int32)
    end = int(cu_seqlens[-1])
    wanted = case.run(x, "cpu")
    got = _divided(case, x, cu_seqlens, group)
    for name in ("o", "dq", "dk", "dv"):
        wanted[name] = wanted[name][:end]
    wanted["lse"] = wanted["lse"][:, :end]
    assert_same_function(got, wanted)


def _divided(
    case: VarlenCase, x: Inputs, cu_seqlens: Tensor, group: dist.ProcessGroup | None
) -> Outputs:
    """Returns the undivided outputs and gradients of the documents. Padding is checked here."""

    def shard(value: Tensor, dim: int = 0) -> Tensor:
        part: Tensor = shard_documents(value.detach(), cu_seqlens, dim=dim, group=group)
        return part

    padding = shard(torch.ones(len(x.q))) == 0
    for value in (shards := [shard(one) for one in (x.q, x.k, x.v)]):
        assert not value[padding].any()
        value[padding] = math.nan
        value.requires_grad_()
    q, k, v = shards
    do, dlse = shard(x.do), None if x.dlse is None else shard(x.dlse, 1)
    do[padding] = 1.0
    if dlse is not None:
        dlse[:, padding] = 1.0
    o, lse = ring_attention_varlen(
        q, k, v, cu_seqlens,
        group=group, mask=case.make_mask(), scale=case.scale, softcap=case.softcap, sinks=x.sinks,
        return_lse=True,
    )  # fmt: skip
    results = with_gradients(replace(x, q=q, k=k, v=v, do=do, dlse=dlse), o, lse)
    for name in ("o", "dq", "dk", "dv"):
        assert not results[name][padding].any(), name
        results[name] = unshard_documents(results[name], cu_seqlens, group=group)
    assert lse[:, padding].isneginf().all()
    results["lse"] = unshard_documents(results["lse"], cu_seqlens, dim=1, group=group)
    if "dsinks" in results:
        dist.all_reduce(results["dsinks"], group=group)
    return results


def check_shards() -> None:
    """Shards of tensors of any dtype and dimension, and their inverse with its gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cu_seqlens = torch.tensor([0, 5, 5, 6, 40])
    for length in (40, 45):
        for dtype in (torch.int64, torch.bool, torch.float32):
            x = torch.randn(2, length, 3).to(dtype)
            dist.broadcast(x, 0)
            own = shard_documents(x, cu_seqlens, dim=-2)
            assert own.shape == (2, -(-length // size), 3)
            assert own.dtype == dtype
            whole = unshard_documents(own, cu_seqlens, dim=1, length=length)
            assert torch.equal(whole[:, :40], x[:, :40])
            assert not whole[:, 40:].any()
            assert torch.equal(unshard_documents(own, cu_seqlens, dim=1), x[:, :40])
    count = shard_documents(torch.ones(45), cu_seqlens).sum()
    dist.all_reduce(count)
    assert count == 40  # padding is 0
    x = torch.arange(45.0, requires_grad=True)
    own = shard_documents(x, cu_seqlens)
    whole = unshard_documents(own, cu_seqlens, length=45)
    (of_shard, of_x) = torch.autograd.grad((rank + 1) * whole.square().sum(), (own, x))
    of_all = size * (size + 1) / 2 * 2  # the sum of the losses of all ranks
    assert torch.equal(of_shard, of_all * own)
    rows = shard_documents(torch.arange(1, 46), cu_seqlens)
    expected = torch.zeros(46).index_copy(0, rows, of_shard)  # padding, with 0, into row 0
    assert torch.equal(of_x, expected[1:])


def inputs(tokens: int = 12) -> list[Tensor]:
    """q, k and v of a shard, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 2, 8, generator=generator).requires_grad_() for _ in range(3)]


def check_errors() -> None:
    """Invalid arguments are refused on all ranks, and the next call works."""
    q, k, v = inputs()
    ends = torch.tensor([0, 5, 24])
    mask = Mask.segments(torch.zeros(1, 12).long()) & Mask.causal()
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (TypeError, "cu_seqlens must be int32 or int64, got torch.float32",
         {"cu_seqlens": ends.float()}),
        (TypeError, "cu_seqlens must be a tensor, got list", {"cu_seqlens": [0, 24]}),
        (ValueError, r"cu_seqlens must be \(B \+ 1,\)", {"cu_seqlens": ends[None]}),
        (ValueError, "cu_seqlens must start at 0, got 5", {"cu_seqlens": ends[1:]}),
        (ValueError, "must not decrease, got 24, then 5 at 2", {"cu_seqlens": ends[[0, 2, 1]]}),
        (ValueError, "cu_seqlens must end within the 24 rows of q of all ranks, got 25",
         {"cu_seqlens": torch.tensor([0, 25])}),
        (ValueError, "cu_seqlens is on meta, q is on cpu", {"cu_seqlens": ends.to("meta")}),
        (ValueError, "may combine only Mask.window and Mask.causal for documents, got a Segments",
         {"mask": mask}),
        (TypeError, "mask must be a Mask or None", {"mask": 1}),
        (ValueError, r"q must be \(length, heads, width\)", {"q": q[None]}),
        (ValueError, "q and k must have the same length, got 11 and 12", {"q": q[1:]}),
        (ValueError, "sinks must be", {"sinks": torch.zeros(3)}),
        (TypeError, "return_lse must be True or False", {"return_lse": 1}),
        (TypeError, "check must be True or False", {"check": 1}),
        (TypeError, "unexpected keyword argument 'bias'", {"bias": None}),
    )  # fmt: skip
    valid = {"q": q, "k": k, "v": v, "cu_seqlens": ends}
    for error, message, options in wrong:
        expect(error, message, partial(ring_attention_varlen, **valid | options))
    for error, message, call in (
        (ValueError, "cu_seqlens must end within the 23 rows of x, got 24",
         lambda: shard_documents(torch.zeros(23), ends)),
        (ValueError, "cu_seqlens is on meta, x is on cpu",
         lambda: shard_documents(torch.zeros(24), ends.to("meta"))),
        (ValueError, "dim must be at most 0", lambda: shard_documents(torch.zeros(8), ends, dim=1)),
        (TypeError, "x must be a tensor", lambda: unshard_documents([1], ends)),
        (ValueError, "cu_seqlens must end within the 22 rows of x of all ranks, got 24",
         lambda: unshard_documents(torch.zeros(11), ends)),
        (ValueError, "length must be at least 24, got 23",
         lambda: unshard_documents(torch.zeros(12), ends, length=23)),
        (TypeError, "length must be an int or None",
         lambda: unshard_documents(torch.zeros(12), ends, length=24.0)),
    ):  # fmt: skip
        expect(error, message, call)
    assert ring_attention_varlen(q, k, v, ends).shape == q.shape


def check_disagreement() -> None:
    """A call that differs on one rank is refused on all of them, which name the difference."""
    rank = dist.get_rank()
    q, k, v = inputs()
    longer = inputs(13)
    many = torch.tensor(list(accumulate([1] * 20, initial=0)))
    one = torch.tensor([0, 24])
    valid = {"q": q, "k": k, "v": v, "cu_seqlens": one}
    calls: dict[str, dict[str, Any]] = {
        r"cu_seqlens: int64 \(3,\) \[0, 5, 24\]\n.*cu_seqlens: int64 \(3,\) \[0, 6, 24\]": (
            {"cu_seqlens": torch.tensor([0, 5 + rank, 24])}
        ),
        r"cu_seqlens: int64 \(21,\) [0-9a-f]+\n": (
            {"cu_seqlens": many.clamp(min=0, max=20 - rank)}
        ),
        "cu_seqlens: int32": {"cu_seqlens": one.int() if rank else one},
        "left=3": {"mask": Mask.window(4 - rank, 0)},
        "Positions": {"mask": Mask.causal() if rank else None},
        r"q: float32 \(1, 2, 13, 8\)": dict(zip("qkv", longer if rank else (q, k, v), strict=True)),
        "error: cu_seqlens must end within the 24 rows": {
            "cu_seqlens": torch.tensor([0, 24 + rank])
        },
        "error: mask may combine only": {"mask": Mask.padding(torch.tensor([3])) if rank else None},
    }
    for message, options in calls.items():
        call = partial(ring_attention_varlen, **valid | options)
        expect(ValueError, "all ranks must make the same call, got", call)
        expect(ValueError, message, call)
    assert ring_attention_varlen(q, k, v, many).shape == q.shape


def check_no_documents() -> None:
    """All tokens are padding."""
    none = torch.tensor([0])
    x = torch.ones(24, 2, 8, requires_grad=True)
    q = shard_documents(x, none)
    o = unshard_documents(ring_attention_varlen(q, q, q, none), none, length=24)
    assert not o.any()
    assert not torch.autograd.grad(o.sum(), x)[0].any()


def check_origins() -> None:
    """Windows with different origins, which are the same in a document."""
    q, k, v = inputs()
    ends = torch.tensor([0, 5, 24])
    window = Mask.window(3, 1)
    one, both = (
        ring_attention_varlen(q, k, v, ends, mask=window & Mask.causal(align=align))
        for align in ("top_left", "bottom_right")
    )
    assert torch.equal(one, both)


def check_autocast() -> None:
    """Under autocast q, k and v are cast, as in `attention_varlen`."""
    q, k, v = inputs()
    ends = torch.tensor([0, 5, 24])
    expected = ring_attention_varlen(*(x.bfloat16() for x in (q, k, v)), ends)
    with torch.autocast("cpu", torch.bfloat16):
        o = ring_attention_varlen(q, k.bfloat16(), v, ends)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected)


def check_compile() -> None:
    """Compiled code has the same results."""
    cu_seqlens = torch.tensor([0, 5, 24])
    x = torch.randn(24, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def layer(x: Tensor) -> Any:
        q = shard_documents(x.sin(), cu_seqlens)
        o = ring_attention_varlen(q, q, q, cu_seqlens, mask=Mask.causal())
        return unshard_documents(o.cos(), cu_seqlens, length=24)

    assert_compiles_alike(layer, [x])


def check_sample() -> None:
    """One launch of the default tier."""
    check_cases("3")
    check_shards()
    check_no_documents()
    check_origins()
    check_errors()
    check_disagreement()


def check_everything() -> None:
    """All checks for two processes; groups of one process too."""
    check_cases("1")
    check_shards()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    check_cases("1", alone[dist.get_rank()])
    check_autocast()
    check_compile()


def check_more_processes() -> None:
    check_cases("1")
    check_shards()
