"""Memory that cannot be read, because it is freed or not aligned to its elements: an error for each
tensor. Memory that another thread writes during a call: it is read once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import COMPILED_BACKENDS, DECODERS, operators_of
from tests.support.linear import linear_arguments
from tests.support.operators import NOTHING_WANTED, assert_declined_if_changed, operator_arguments
from tests.support.runtime import freed, freed_view, misaligned
from transformer_kernels.backends.native import extension
from transformer_kernels.backends.triton import operators as triton_operators
from transformer_kernels.functional import decode, kv_cache, varlen
from transformer_kernels.integrations.torch_sdpa import ArgumentValueError
from transformer_kernels.masks.resolved import ResolvedMask
from transformer_kernels.problem.cache import resolve_cache_mask
from transformer_kernels.problem.layout import DENSE, Layout
from transformer_kernels.scores.options import PLAIN_SCORES

B, H, N, D = 1, 2, 70, 16
Damage = Callable[[Tensor], Tensor]
Make = Callable[[Damage], dict[str, Any]]

MESSAGES: dict[Damage, str] = {
    freed: "has the shape .* its storage is freed",
    freed_view: "has the shape .* its storage is freed",
    misaligned: "has elements of . bytes, but its memory starts at 0x",
}
OF_OPERATORS: dict[Damage, str] = {
    freed: "it was freed|storage is freed",
    freed_view: "it was freed|storage is freed",
    misaligned: "is not aligned to its elements|its memory starts at 0x",
}
BYTES = ("dense", "blocks", "block_mask", "attn_mask")
"""Bool tensors, which are always aligned."""


def each_damaged(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrizes a test by the name of a tensor, and a function that returns it damaged."""
    pairs = [(x, f) for x in names for f in MESSAGES if not (f is misaligned and x in BYTES)]
    ids = [f"{name}-{damage.__name__}" for name, damage in pairs]
    return pytest.mark.parametrize(("name", "damage"), pairs, ids=ids)


def refused(name: str, damage: Damage, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=f"{name} {MESSAGES[damage]}")


def refused_by_operator(damage: Damage) -> Any:
    return pytest.raises((RuntimeError, ValueError), match=OF_OPERATORS[damage])


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D), torch.randn(B, H, N, D), torch.randn(B, H, N, D)


IDS = torch.zeros(B, N, dtype=torch.int64)
POSITIONS = dict.fromkeys(("q_low", "q_high", "k_position"), IDS[None, :, None])
ONES = torch.ones(B, H, N, N, dtype=torch.bool)
LENGTHS = torch.tensor([9])

ATTENTION: dict[str, tuple[str, Make]] = {
    "q": ("q", lambda bad: {"q": bad(qkv()[0])}),
    "k": ("k", lambda bad: {"k": bad(qkv()[1])}),
    "v": ("v", lambda bad: {"v": bad(qkv()[2])}),
    "bias": ("bias", lambda bad: {"bias": bad(torch.zeros(N, N))}),
    "slopes": ("bias", lambda bad: {"bias": tk.alibi(bad(torch.ones(H)))}),
    "slopes-float64": ("bias", lambda bad: {"bias": tk.alibi(bad(torch.ones(H).double()))}),
    "table": (
        "the table of relative",
        lambda bad: {"relative": tk.relative_bias(bad(torch.ones(H, 3)), lowest=0)},
    ),
    "keys": (
        "the keys of relative",
        lambda bad: {"relative": tk.relative_keys(bad(torch.ones(H, 3, D)), lowest=0)},
    ),
    "table-of-keys": (
        "the table of relative",
        lambda bad: {
            "relative": tk.relative_keys(torch.ones(H, 3, D), table=bad(torch.ones(H, 3)), lowest=0)
        },
    ),
    "scale": ("scale", lambda bad: {"scale": bad(torch.ones(1))}),
    "sinks": ("sinks", lambda bad: {"sinks": bad(torch.ones(H))}),
    "seed": ("seed", lambda bad: {"seed": bad(torch.tensor(1)), "dropout_p": 0.5}),
    "lengths": ("KeyRange.end", lambda bad: {"mask": tk.Mask.padding(bad(LENGTHS))}),
    "lengths-int32": ("KeyRange.end", lambda bad: {"mask": tk.Mask.padding(bad(LENGTHS.int()))}),
    "start": ("KeyRange.start", lambda bad: {"mask": tk.Mask.key_range(bad(LENGTHS), LENGTHS)}),
    "q_ids": ("Segments.q_ids", lambda bad: {"mask": tk.Mask.segments(bad(IDS), IDS)}),
    "q_pos": ("Positions.q_pos", lambda bad: {"mask": tk.Mask.positions(bad(IDS), IDS)}),
    "k_pos": ("Positions.k_pos", lambda bad: {"mask": tk.Mask.positions(IDS, bad(IDS.int()))}),
    "low": ("Intervals.low", lambda bad: {"mask": tk.Mask.intervals(bad(IDS), None, IDS)}),
    "k_ids": ("Segments.k_ids", lambda bad: {"mask": tk.Mask.segments(IDS, bad(IDS.int()))}),
    "two-ids": (
        "Segments.q_ids",
        lambda bad: {"mask": tk.Mask.segments(IDS) & tk.Mask.segments(bad(IDS))},
    ),
}
"""Name in the message, and the options of the call."""


@each_damaged(ATTENTION)
def test_attention(name: str, damage: Damage, backend: str) -> None:
    expected, make = ATTENTION[name]
    given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True)) | make(damage)
    with refused(expected, damage):
        tk.attention(**given, backend=backend)


@pytest.mark.parametrize("damage", [freed, freed_view])
def test_masks_of_fewer_dimensions(damage: Damage) -> None:
    """The constructors add dimensions."""
    with refused("attn_mask", damage):
        tk.Mask.dense(damage(ONES[0, 0]))
    with refused("blocks", damage):
        tk.Mask.block_sparse(damage(ONES[0, 0]), 16)
    with refused("indices", damage):
        tk.Mask.selected(damage(IDS[..., None]))


def freeable_masks() -> dict[str, tuple[tk.Mask, Tensor]]:
    """Masks and the tensor to free afterwards: the constructors index it."""
    attn_mask, layout = ONES.clone(), torch.ones(1, 5, 5, dtype=torch.bool)
    dense, blocks = tk.Mask.dense(attn_mask), tk.Mask.block_sparse(layout, 16)
    indices = torch.zeros(1, 1, N, 1, dtype=torch.int32)
    lists = tk.Mask.selected(indices)
    return {
        "lists": (lists, indices),
        "two-lists": (tk.Mask.selected(IDS[..., None]) & lists, indices),
        "dense": (dense, attn_mask),
        "two-dense": (tk.Mask.dense(ONES) & dense, attn_mask),
        "blocks": (blocks, layout),
        "two-layouts": (tk.Mask.block_sparse(ONES[0, :, :5, :5], 16) & blocks, layout),
    }


@pytest.mark.parametrize("name", freeable_masks())
def test_masks(name: str, backend: str) -> None:
    mask, tensor = freeable_masks()[name]
    tensor.untyped_storage().resize_(0)
    names = "(Dense.attn_mask|BlockSparse.blocks|Selected.indices)"
    message = f"{names} has the shape .* its storage is freed"
    with pytest.raises(ValueError, match=message):
        tk.attention(*qkv(), mask=mask, backend=backend)
    with pytest.raises(ValueError, match=message):
        mask.materialize(B, H, N, N)


@each_damaged(("cu_seqlens_q", "cu_seqlens_k", "q"))
def test_varlen(name: str, damage: Damage, backend: str) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in qkv())
    given: dict[str, Any] = {"q": q, "cu_seqlens_q": LENGTHS * 0, "cu_seqlens_k": LENGTHS * 0}
    given[name] = damage(given[name])
    with refused(name, damage):
        tk.attention_varlen(k=k, v=v, **given, max_seqlen_q=9, max_seqlen_k=9, backend=backend)


@pytest.mark.parametrize("decoder", ["auto", *DECODERS])
@each_damaged(("q", "k_cache", "v_cache", "cache_seqlens", "block_table"))
def test_decode(name: str, damage: Damage, decoder: str) -> None:
    given: dict[str, Any] = {
        "q": torch.randn(1, H, 1, D),
        "k_cache": torch.randn(3, H, 4, D),
        "v_cache": torch.randn(3, H, 4, D),
        "cache_seqlens": LENGTHS,
        "block_table": torch.tensor([[2, 1, 0]]),
    }
    given[name] = damage(given[name])
    with refused(name, damage):
        tk.attention_decode(**given, backend=decoder)
    if name != "q":
        new = torch.randn(1, H, 1, D)
        del given["q"]
        with refused(name, damage):
            tk.append_to_cache(k=new, v=new, **given)


@each_damaged(("q", "k", "v"))
def test_autocast(name: str, damage: Damage) -> None:
    """Autocast converts the arguments."""
    given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    given[name] = damage(given[name])
    with torch.autocast("cpu", torch.bfloat16), refused(name, damage):
        tk.attention(**given)


@each_damaged(("k", "v"))
def test_appended_tensors(name: str, damage: Damage) -> None:
    new, cache = torch.randn(1, H, 1, D), torch.randn(1, H, 16, D)
    given: dict[str, Any] = {"k": new, "v": new} | {name: damage(new)}
    with refused(name, damage):
        tk.append_to_cache(cache, cache.clone(), **given, cache_seqlens=LENGTHS)


@each_damaged(("query", "key", "value", "attn_mask"))
def test_drop_in(name: str, damage: Damage) -> None:
    query, key, value = qkv()
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": ONES[0, 0]}
    given[name] = damage(given[name])
    with refused(name, damage, ArgumentValueError):
        tk.scaled_dot_product_attention(**given)


OPERATOR_TENSORS: dict[str, dict[str, Any]] = {
    "q": {},
    "k": {},
    "v": {},
    "bias": {"bias": torch.zeros(1, 1, N, N)},
    "alibi_slopes": {"alibi_slopes": torch.ones(1, H)},
    "relative_bias": {"relative_bias": torch.ones(H, 2 * N - 1)},
    "relative_keys": {"relative_keys": torch.ones(H, 2 * N - 1, D)},
    "seed": {"seed": torch.tensor(1), "dropout_p": 0.5},
    "key_start": {"key_start": LENGTHS, "key_end": LENGTHS},
    "key_end": {"key_start": LENGTHS, "key_end": LENGTHS},
    "q_low": POSITIONS,
    "q_high": POSITIONS,
    "k_position": POSITIONS,
    "dense": {"dense": ONES},
    "blocks": {"blocks": ONES[0, :, :5, :5], "block_size": 16},
    "cu_seqlens_q": {"cu_seqlens_q": IDS[0, :2].int(), "cu_seqlens_k": IDS[0, :2].int()},
    "cu_seqlens_k": {"cu_seqlens_q": IDS[0, :2].int(), "cu_seqlens_k": IDS[0, :2].int()},
}


@each_damaged(OPERATOR_TENSORS)
@pytest.mark.parametrize("operators", [*COMPILED_BACKENDS, "triton"])
def test_operators(name: str, damage: Damage, operators: str) -> None:
    """Compiled code calls the operators without the checks of Python."""
    forward, backward = triton_operators.forward, triton_operators.backward
    if operators != "triton":
        namespace = operators_of(operators)
        forward, backward = namespace.attention_forward, namespace.attention_backward
    arguments = operator_arguments(*qkv(), **OPERATOR_TENSORS[name])
    o, row_stats, block_mask = forward(**arguments)
    arguments[name] = damage(arguments[name])
    with refused_by_operator(damage):
        forward(**arguments)
    q, k, v, *options = arguments.values()
    with refused_by_operator(damage):
        backward(o, None, q, k, v, o, row_stats, block_mask, *options, *NOTHING_WANTED)


SAVED = ("do", "dlse", "q", "k", "v", "o", "row_stats", "block_mask")


@each_damaged(SAVED)
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_backward_operators(name: str, damage: Damage, backend: str) -> None:
    operators = operators_of(backend)
    q, k, v, *rest = operator_arguments(*qkv(), dense=ONES).values()
    o, row_stats, block_mask = operators.attention_forward(q, k, v, *rest)
    dlse = row_stats[0].clone()
    saved = dict(zip(SAVED, (o, dlse, q, k, v, o, row_stats, block_mask), strict=True))
    saved[name] = damage(saved[name])
    with refused_by_operator(damage):
        operators.attention_backward(*saved.values(), *rest, *NOTHING_WANTED)


def paged() -> dict[str, Any]:
    cache = torch.randn(3, H, 4, D)
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    options = {"cache_seqlens": LENGTHS.int(), "block_table": table}
    options |= {"alibi_slopes": torch.ones(1, H), "key_end": LENGTHS}
    options["relative_bias"] = torch.ones(H, table.shape[1] * cache.shape[2])
    return operator_arguments(torch.randn(1, H, 1, D), cache, cache, **options)


@each_damaged([name for name, x in paged().items() if isinstance(x, Tensor)])
@pytest.mark.parametrize("backend", COMPILED_BACKENDS)
def test_decoding_operators(name: str, damage: Damage, backend: str) -> None:
    arguments = paged()
    arguments[name] = damage(arguments[name])
    with refused_by_operator(damage):
        operators_of(backend).attention_forward(**arguments)


@pytest.mark.parametrize("damage", MESSAGES)
def test_direct_calls_decline(damage: Damage) -> None:
    """Every tensor of a direct call, outputs included."""

    def change(x: Tensor) -> Tensor:
        return freed(x) if damage is misaligned and x.element_size() == 1 else damage(x)

    q, k, v = qkv()
    out, row_stats = torch.empty_like(q), torch.empty(2, B, H, N)
    tests = IDS[None, :, None]
    mask = ResolvedMask(
        key_start=LENGTHS, key_end=LENGTHS, dense=ONES, q_low=tests, q_high=tests,
        k_position=tests,
        blocks=torch.ones(1, 5, 5).bool(), block_size=16,
    )  # fmt: skip
    block_mask = torch.empty(B, H, 2, 2, dtype=torch.uint8)
    gradients = map(torch.empty_like, (q, k, v))
    forward = [q, k, v, PLAIN_SCORES, mask, DENSE, block_mask, True, out, row_stats, True]
    backward = [q, k, v, PLAIN_SCORES, mask, DENSE, block_mask, out, row_stats, q, *gradients]
    cache = torch.randn(3, H, 4, D)
    layout = Layout(cache_seqlens=LENGTHS, block_table=torch.tensor([[2, 1, 0]]))
    first = q[:, :, :1]
    decode = [
        first, cache, cache, PLAIN_SCORES, ResolvedMask(bottom_right=True), layout,
        None, True, first.clone(), None, True,
    ]  # fmt: skip
    assert_declined_if_changed(extension.compiled.direct_forward, forward, change)
    assert_declined_if_changed(extension.compiled.direct_backward, backward, change)
    assert_declined_if_changed(extension.compiled.direct_forward, decode, change)


def test_freed_memory_of_linear_attention() -> None:
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    k.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"k has the shape .* but its storage is freed"):
        tk.linear_attention(q, k, v)
    k = torch.randn(2, 2, 9, 8)
    state = tk.LinearState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8))
    state.S.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"initial_state.S has the shape .* is freed"):
        tk.linear_attention(q, k, v, initial_state=state)
    with pytest.raises(RuntimeError, match="it was freed"):
        torch.ops.transformer_kernels.linear_forward(**linear_arguments(q, k, v, **state._asdict()))


@each_damaged(("x", "weight", "bias", "state"))
def test_damaged_memory_of_convolutions(name: str, damage: Damage) -> None:
    sizes = {"x": (2, 5, 9), "weight": (5, 4), "bias": (5,), "state": (2, 5, 3)}
    tensors = {n: torch.randn(size) for n, size in sizes.items()}
    tensors[name] = damage(tensors[name])
    x, weight, bias, state = tensors.values()
    with refused(name, damage):
        tk.causal_conv1d_step(x, weight, bias, state)
    with refused("initial_state" if name == "state" else name, damage):
        tk.causal_conv1d(x, weight, bias, initial_state=state)
    forward = torch.ops.transformer_kernels.conv_forward
    with refused_by_operator(damage):
        forward(x, weight, bias, state, None, True)


# Another thread may write lengths, offsets and pages during a call: they are read once.


WRITTEN = -(1 << 20)
each_integer = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


def write_after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *tensors: Tensor) -> None:
    """Writes to the tensors, as another thread may, when the module's function `name` has run."""
    function: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        for x in tensors:
            x.fill_(WRITTEN)
        return result

    monkeypatch.setattr(module, name, call)


@each_integer
def test_offsets_of_varlen_are_copied(
    dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(90, 2, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2)

    starts = [torch.tensor(x, dtype=dtype) for x in ([0, 30, 80], [0, 9, 90])]
    options: dict[str, Any] = {"sinks": sinks, "return_lse": True, "backend": backend}

    def step() -> tuple[Tensor, ...]:
        o, lse = tk.attention_varlen(q, k, v, *starts, **options)
        return o, lse, *torch.autograd.grad(o.sin().sum(), (q, k, v))

    expected = step()
    write_after(monkeypatch, varlen, "varlen_problem", *starts)
    found = step()
    assert starts[0][0] == WRITTEN
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def cached(dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, cache = torch.randn(2, 2, 1, 16), torch.randn(5, 2, 8, 16)
    lengths = torch.tensor([20, 9], dtype=dtype)
    return q, cache, -cache, lengths, torch.tensor([[3, 1, 4], [0, 2, 99]], dtype=dtype)


@each_integer
@pytest.mark.parametrize("decoder", DECODERS)
def test_lengths_and_pages_of_decode_are_copied(
    dtype: torch.dtype, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = cached(dtype)
    options: dict[str, Any] = {"return_lse": True, "backend": decoder}
    expected = tk.attention_decode(*arguments, **options)
    write_after(monkeypatch, decode, "cache_problem", *arguments[3:])
    found = tk.attention_decode(*arguments, **options)
    assert arguments[4][0, 0] == WRITTEN
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@each_integer
def test_lengths_and_pages_of_append_to_cache_are_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, cache, _, lengths, table = cached(dtype)
    caches = [cache.clone() for _ in range(4)]
    tk.append_to_cache(caches[0], caches[1], new, -new, lengths, table)
    write_after(monkeypatch, kv_cache, "check_cache", lengths, table)
    tk.append_to_cache(caches[2], caches[3], new, -new, lengths, table)
    assert table[0, 0] == WRITTEN
    assert not torch.equal(caches[0], cache)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@each_integer
def test_direct_decode(dtype: torch.dtype) -> None:
    """The output of the first sequence overwrites the block table of the second one."""
    cache = torch.randn(9, 1, 16, 16)
    q, lengths = torch.randn(2, 1, 64, 16), torch.tensor([80, 70], dtype=dtype)
    pages = torch.tensor([[4, 1, 3, 0, 2], [8, 5, 7, 6, 2]], dtype=dtype)
    memory, o = torch.zeros(q.numel()), torch.empty_like(q)
    table = memory.view(dtype)[:10].view(2, 5)
    for block_table, out in ((pages, o), (table.copy_(pages), memory.view(q.shape))):
        layout = Layout(cache_seqlens=lengths, block_table=block_table)
        options = PLAIN_SCORES, resolve_cache_mask(None), layout
        given = (q, cache, cache, *options, None, True, out, None, True)
        assert extension.compiled.direct_forward(*given) is None
    assert torch.equal(memory.view(q.shape), o)


@contextmanager
def flipped(x: Tensor, other: Tensor) -> Iterator[None]:
    """Context in which a thread overwrites x, in turns with `other` and with its own values."""
    contents, done = [other, x.clone()], threading.Event()
    bytes_ = x.numel() * x.element_size()
    assert x.shape == other.shape
    assert x.dtype == other.dtype

    def write() -> None:
        while not done.is_set():
            for content in contents:
                ctypes.memmove(x.data_ptr(), content.data_ptr(), bytes_)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_varlen_operator() -> None:
    """Each call sees valid offsets, or raises; without a copy it reads rows that do not exist."""
    B = 2000
    q, k = torch.randn(1, 1, B, 8), torch.randn(1, 1, 1, 8)
    starts_k, starts_q = torch.zeros(B + 1).int(), torch.arange(B + 1).int()
    starts_k[1:] = 1
    arguments = operator_arguments(q, k, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    operator = torch.ops.transformer_kernels.attention_forward
    expected, _, _ = operator(**arguments)
    with flipped(starts_q, starts_q + (1 << 22)):
        for _ in range(50):
            try:
                o, _, _ = operator(**arguments)
            except RuntimeError as error:
                assert "cu_seqlens must start at 0" in str(error)  # noqa: PT017
            else:
                assert torch.equal(o, expected)


@pytest.mark.parametrize("by_operator", [True, False], ids=["operator", "direct"])
def test_decode_of_many_pages(by_operator: bool) -> None:
    B = 256
    q, cache = torch.randn(B, 1, 1, 8), torch.randn(64, 1, 16, 8)
    lengths, table = torch.full((B,), 128).int(), torch.zeros(B, 8).int()
    options = {"cache_seqlens": lengths, "block_table": table, "scale": 0.25, "diagonal_high": 0}
    arguments = operator_arguments(q, cache, cache, **options, bottom_right=True)
    operator = torch.ops.transformer_kernels.attention_forward

    def call() -> Tensor:
        if by_operator:
            o: Tensor = operator(**arguments)[0]
            return o
        return tk.attention_decode(q, cache, cache, lengths, table, scale=0.25)

    expected = call()
    with flipped(table, table + (1 << 22)):
        for _ in range(50):
            try:
                o = call()
            except (RuntimeError, ValueError) as error:
                assert "block_table must hold" in str(error)  # noqa: PT017
            else:
                assert torch.equal(o, expected)
