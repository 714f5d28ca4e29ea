"""The adapters against what takes their place without them: the tables of docs/quickstarts.

- `jagged`: self-attention of jagged nested tensors and of padded ones, in torch and by our kernels.
- `block mask`: causal documents of 300 tokens, by FlexAttention and by our kernels.
- `crops`: images of two sizes in one row, by a block-diagonal mask of xFormers, which itself runs
  on GPUs only, against sdpa with a dense mask, and against sdpa of each size.
- `one token`, `pages`, `short call`: functions of flash_attn, which itself runs on GPUs only,
  against sdpa of a padded cache, against keys that are packed already, and against `attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

import transformer_kernels as tk
from benchmarks.runner.checks import BOUND, Sizes, checked_calls
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Direction
from transformer_kernels.bench.workload import Prepare
from transformer_kernels.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from transformer_kernels.integrations.xformers.fmha import (
    BlockDiagonalMask,
    memory_efficient_attention,
)

DOCUMENT = 300
PAGE = 16
LENGTHS = (2048, 1024, 512, 256)
BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")


def comparisons() -> Iterator[Comparison]:
    def sizes(name: str, B: int, H_q: int, H_kv: int, M: int, N: int) -> Iterator[Sizes]:
        for dtype in (torch.float32, torch.bfloat16):
            yield Sizes(name=name, B=B, H_q=H_q, H_kv=H_kv, M=M, N=N, dtype=dtype)

    def each(
        measure: Callable[[Sizes, Run], Iterator[Measurement]], problems: Iterator[Sizes]
    ) -> Iterator[Comparison]:
        for one in problems:
            yield Comparison(
                name=f"{one.name}-{one.dtype_name}", measurements=partial(measure, one)
            )

    yield from each(jagged, sizes("jagged", 8, 12, 12, 512, 512))
    yield from each(block_mask, sizes("block mask", 1, 8, 8, 2048, 2048))
    yield from each(crops, sizes("crops", 20, 6, 6, 50, 257))
    yield from each(one_token, sizes("one token", 4, 32, 8, 1, max(LENGTHS)))
    for new in (256, 16):
        yield from each(pages, sizes(f"pages, {new} tokens", 4, 32, 8, new, max(LENGTHS)))
    yield from each(short_call, sizes("short call", 1, 12, 12, 16, 16))


def _timed(
    run: Run, case: Sizes, calls: Mapping[str, Prepare], direction: Direction = "fwd"
) -> Measurement:
    return run.timed(checked_calls(case, direction, calls, BOUND[case.dtype]))


def jagged(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures B sequences, lengths spread evenly from 1 to N."""
    lengths = torch.linspace(1, case.N, case.B).round().int()
    rows = [torch.randn(n, case.H_q, case.D, dtype=case.dtype) for n in lengths.tolist()]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged).requires_grad_()
    padded = pad_sequence(rows, batch_first=True).requires_grad_()
    visible = torch.arange(case.N) < lengths[:, None]
    do = torch.randn(sum(map(len, rows)), case.H_q, case.D, dtype=case.dtype)

    def packed() -> Tensor:
        q = nested.transpose(1, 2)
        return scaled_dot_product_attention(q, q, q).transpose(1, 2).values()

    def masked() -> Tensor:
        q, mask = padded.transpose(1, 2), visible[:, None, None]
        return scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2)[visible]

    def gradient(call: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Returns the gradient of the tokens, one row each."""
        dx = torch.autograd.grad(call(), x, do)[0]
        return dx.values() if dx.is_nested else dx[visible]

    calls = {"jagged": (packed, nested), "padded": (masked, padded), "cpu": (packed, nested)}

    def prepare(name: str, direction: Direction) -> Callable[[], Tensor]:
        (tk.enable if name == "cpu" else tk.disable)()
        call, x = calls[name]
        return call if direction == "fwd" else partial(gradient, call, x)

    try:
        for direction in BOTH:
            yield _timed(
                run, case, {name: partial(prepare, name, direction) for name in calls}, direction
            )
    finally:
        tk.disable()


def block_mask(case: Sizes, run: Run) -> Iterator[Measurement]:
    document = torch.arange(case.N) // DOCUMENT

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i)

    blocks = create_block_mask(mask_mod, None, None, case.M, case.N, "cpu")
    mask, compiled = tk.Mask.from_block_mask(blocks), torch.compile(flex_attention)
    q, k, v, _ = case.inputs()
    yield _calls(
        run, case,
        flex=lambda: compiled(q, k, v, block_mask=blocks),
        cpu=lambda: tk.attention(q, k, v, mask=mask),
    )  # fmt: skip


def crops(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures self-attention of B sequences in one row, a fifth with N tokens and the others with
    M: the crops of two images in the pretraining of DINOv2 (arXiv:2304.07193)."""
    numbers = [case.B // 5, case.B - case.B // 5]
    lengths = [case.N] * numbers[0] + [case.M] * numbers[1]
    shape = 1, sum(lengths), case.H_q, case.D
    q, k, v = (torch.randn(shape, dtype=case.dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, dtype=case.dtype)
    bias = BlockDiagonalMask.from_seqlens(lengths, device="cpu")
    bias._batch_sizes = numbers
    visible = bias.materialize((sum(lengths), sum(lengths))) == 0

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def split() -> Tensor:
        parts = zip(bias.split(q), bias.split(k), bias.split(v), strict=True)
        return torch.cat([attend(*part).flatten(0, 1) for part in parts])[None]

    def ours() -> Tensor:
        return memory_efficient_attention(q, k, v, bias)

    def infer(call: Callable[[], Tensor]) -> Tensor:
        with torch.no_grad():
            return call()

    def train(call: Callable[[], Tensor]) -> Tensor:
        return torch.stack(torch.autograd.grad(call(), (q, k, v), do))

    calls = {"sdpa": lambda: attend(q, k, v, visible), "split": split, "cpu": ours}
    for direction, one in zip(BOTH, (infer, train), strict=True):
        yield _calls(run, case, direction, **{n: partial(one, call) for n, call in calls.items()})


def _calls(
    run: Run, case: Sizes, direction: Direction = "fwd", **calls: Callable[[], Tensor]
) -> Measurement:
    """Measures calls without a set-up."""
    prepared = {name: partial(lambda one: one, call) for name, call in calls.items()}
    return _timed(run, case, prepared, direction)


def _lengths(case: Sizes) -> list[int]:
    """Keys of each sequence: N, N / 2, ..."""
    return [case.N >> n for n in range(case.B)]


def one_token(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures one token for each sequence: it is written into the cache, and attends to it."""
    B, longest, dtype = case.B, case.N, case.dtype
    q = torch.randn(B, 1, case.H_q, case.D, dtype=dtype)
    k, v = (torch.randn(B, 1, case.H_kv, case.D, dtype=dtype) for _ in range(2))
    caches = (torch.randn(B, longest + 1, case.H_kv, case.D, dtype=dtype) for _ in range(2))
    k_cache, v_cache = caches
    used = torch.tensor(_lengths(case), dtype=torch.int32)
    visible = (torch.arange(longest + 1) <= used[:, None])[:, None, None]
    entry = torch.arange(B)

    def by_sdpa() -> Tensor:
        k_cache[entry, used], v_cache[entry, used] = k[:, 0], v[:, 0]
        o = scaled_dot_product_attention(
            q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2),
            attn_mask=visible, enable_gqa=case.H_q != case.H_kv,
        )  # fmt: skip
        return o.transpose(1, 2)

    def by_ours() -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True)

    yield _calls(run, case, sdpa=by_sdpa, cpu=by_ours)


def pages(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures M tokens, fewer by one for each further sequence, with keys in pages."""
    lengths = _lengths(case)
    queries = [case.M - n for n in range(case.B)]
    q = torch.randn(sum(queries), case.H_q, case.D, dtype=case.dtype)
    count = sum(lengths) // PAGE
    k, v = (torch.randn(count, PAGE, case.H_kv, case.D, dtype=case.dtype) for _ in range(2))
    order = torch.randperm(count)
    table = torch.zeros(case.B, case.N // PAGE, dtype=torch.int32)
    for b, part in enumerate(order.split([length // PAGE for length in lengths])):
        table[b, : len(part)] = part
    k_packed, v_packed = (x[order].flatten(0, 1) for x in (k, v))
    sizes = (_ends(queries), _ends(lengths), case.M, case.N)

    def by_packed() -> Tensor:
        return flash_attn_varlen_func(q, k_packed, v_packed, *sizes, causal=True)

    def by_ours() -> Tensor:
        return flash_attn_varlen_func(q, k, v, *sizes, causal=True, block_table=table)

    yield _calls(run, case, packed=by_packed, cpu=by_ours)


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def short_call(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures the time of the adapter."""
    q, k, v = (torch.randn(1, case.N, case.H_q, case.D, dtype=case.dtype) for _ in range(3))
    causal = tk.Mask.causal(align="bottom_right")

    def direct() -> Tensor:
        return tk.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=causal).transpose(1, 2)

    yield _calls(run, case, attention=direct, cpu=lambda: flash_attn_func(q, k, v, causal=True))
