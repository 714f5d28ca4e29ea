"""Attention of sparse and relative models, against causal attention, and what their layers store.

- `relative table` and `relative keys`: scores by distance, against the same scores as a dense bias
  and by FlexAttention, which has no backward pass on a CPU. With torch 2.13 and AVX2 its results at
  toy sizes depend on memory that it has not written: rows may be zero.
- `sparse`: patterns of the Sparse Transformer, with their views, gathers and merges. Their
  `visible` over that of causal attention is the share of the pairs that they show.
- `selected`: lists of 2,048 of 32,768 keys, against the same pairs as a dense mask.
- `reformer`: attention by hashing, with the hashing, the sorting and the merging. `reformer layers`
  is for the peak memory. The C library keeps free memory in its heap, by default several times as
  much as is in use: MALLOC_MMAP_THRESHOLD_=65536 turns that off.
- `transformer-xl`: the gradients of a segment with a full memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.runner.checks import (
    Sizes,
    attention_contenders,
    causal_sizes,
    checked_calls,
    projected_inputs,
    relative_error,
)
from benchmarks.runner.record import case_id
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels import Mask, RelativeKeys, attention, relative_bias, relative_keys
from transformer_kernels.bench import Attend, Budget, Case, Direction, Inputs
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.models import TransformerXL, TransformerXLConfig
from transformer_kernels.nn import (
    AttnImplementation,
    ReformerBlock,
    ReversibleStack,
    SparsePattern,
    attend,
    default_buckets,
    hash_buckets,
    lsh_attention,
    relative_attention,
    sorted_by_bucket,
    sparse_attention,
)

BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")
CAUSAL = Mask.causal(align="bottom_right")
LISTED = (2048, 32_768)
"""Keys in a list, and keys in all"""
SELECTING = (
    (32, 8, 1, 1, 1),
    (32, 8, 16, 1, 1),
    (16, 1, 256, 1, 1),
    (8, 2, 256, 1, 1),
    (8, 2, 256, 128, 1),
    (8, 2, 256, 128, 64),
)
"""H_q, H_kv, M, keys of a block, and queries in a row with one list"""
BOUND = 0.02
"""Largest error, relative to the largest value"""


def comparisons() -> Iterator[Comparison]:
    for dtype in (torch.float32, torch.bfloat16):
        for S in (512, 2048):
            yield _of(relative, Case(name="relative table", M=S, N=S, dtype=dtype))
        for H, M, N in ((4, 512, 1024), (8, 2048, 2048)):
            case = Case(name="relative keys", H_q=H, H_kv=H, M=M, N=N, dtype=dtype)
            yield _of(relative, replace(case, mask=CAUSAL, mask_name="causal"))
        for S in (12_288, 65_536):
            yield _of(sparse, causal_sizes("sparse", H=2, S=S, dtype=dtype))
        for H_q, H_kv, M, block, alike in SELECTING:
            case = Sizes(
                name=f"selected, {H_q}/{H_kv} heads, {M} queries, blocks of {block}, {alike} alike",
                H_q=H_q, H_kv=H_kv, M=M, N=LISTED[1], D=128, D_v=128, dtype=dtype,
                mask_name="selected", share=LISTED[0] / LISTED[1],
            )  # fmt: skip
            yield _of(partial(selected, size=block, alike=alike), case)
        for S in (1024, 4096, 16_384, 65_536):
            yield _of(reformer, causal_sizes("reformer", H=2, S=S, dtype=dtype))
    for layers in (2, 12, 24):
        size = Sizes(name=f"reformer layers: {layers}", H_q=4, H_kv=4, M=16_384, N=16_384)
        yield Comparison(name=size.name, measurements=partial(reversible, size, layers))
    for memory, batch in ((0, 1), (512, 1), (1024, 1), (512, 4)):
        config = TransformerXLConfig(
            layers=2, heads=4, width=256, context=512, memory=memory, dropout=0.0
        )
        yield Comparison(
            name=f"transformer-xl-{memory}-B{batch}",
            measurements=partial(transformer_xl, config, batch),
        )


def _of(measure: Callable[[Any, Run], Iterator[Measurement]], case: Case) -> Comparison:
    return Comparison(name=case_id(case), measurements=partial(measure, case))


# Scores by distance.

ENTRIES = 257
"""Entries of the tables: T5's distances, -128 to 128."""
FLEX = "flex"


@dataclass(frozen=True)
class Scores:
    """Attention functions with the same scores by distance, and what they learn."""

    attends: dict[str, Attend]
    learned: dict[str, tuple[Tensor, ...]]


def relative(case: Case, run: Run) -> Iterator[Measurement]:
    """Measures no relative positions, our operator, a dense bias and FlexAttention, in this order.

    Raises:
        AssertionError: our result differs from that with the dense bias.
    """
    inputs = case.inputs()
    scores = (_by_table if case.mask is None else _by_keys)(case)
    attends, errors = dict(scores.attends), {}
    with torch.no_grad():
        expected = attends["dense bias"](*inputs[:3])
        errors["relative"] = relative_error(
            case.name, attends["relative"](*inputs[:3]), expected, BOUND
        )
        try:
            of_flex = attends[FLEX](*inputs[:3])
            errors[FLEX] = relative_error(f"{case.name}: {FLEX}", of_flex, expected, BOUND)
        except AssertionError as wrong:
            run.skipped.append(str(wrong))
            del attends[FLEX]
    for direction in BOTH:
        if direction == "fwd+bwd":
            attends.pop(FLEX, None)
        yield run.timed(
            attention_contenders(case, direction, attends, inputs, errors, scores.learned)
        )


def _normal(case: Case, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(case.dtype)


def _by_table(case: Case) -> Scores:
    table = _normal(case, case.H_q, ENTRIES).float().requires_grad_()
    relative = relative_bias(table, lowest=-(ENTRIES // 2), align="bottom_right")
    bias = relative.dense(case.M, case.N).detach().to(case.dtype).requires_grad_()
    flat, shift = table.detach().to(case.dtype), case.N - case.M + ENTRIES // 2

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + flat[h, (i - j + shift).clamp(0, ENTRIES - 1)]

    attends: dict[str, Attend] = {
        "none": attention,
        "relative": partial(attention, relative=relative),
        "dense bias": partial(attention, bias=bias),
        FLEX: partial(_compiled_flex(), score_mod=add),
    }
    return Scores(attends, {"relative": (table,), "dense bias": (bias,)})


def _by_keys(case: Case) -> Scores:
    M, N = case.M, case.N
    keys = _normal(case, case.H_q, N, case.D).requires_grad_()
    relative = relative_keys(keys, lowest=0, align="bottom_right")
    scale: float = case.D**-0.5

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + N - M

    blocks, compiled = create_block_mask(visible, None, None, M, N, device="cpu"), _compiled_flex()

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        products = q @ keys.detach().mT * scale

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + products[b, h, i, (i + N - M - j).clamp(0, N - 1)]

        return compiled(q, k, v, score_mod=add, block_mask=blocks)

    def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=case.mask, bias=causal_bias(q, relative, scale))

    attends: dict[str, Attend] = {
        "none": partial(attention, mask=case.mask),
        "relative": partial(attention, mask=case.mask, relative=relative),
        "dense bias": with_bias,
        FLEX: flex,
    }
    return Scores(attends, {"relative": (keys,), "dense bias": (keys,)})


def causal_bias(q: Tensor, relative: RelativeKeys, scale: float) -> Tensor:
    """Returns scale q_i r_e + t_e, e = i + N - M - j, as a view of a product.

    Distances after the diagonal are not computed, which halves the product of N = M: elements with
    e < 0 are those of other rows and must be masked.

    Args:
        q: queries (B, H, M, D).
        relative: keys (H, N, D) of the distances 0 to N - 1, and their table, if it has one.
        scale: factor of the products.

    Returns:
        (B, H, M, N).
    """
    q, keys = q * scale, relative.keys
    if relative.table is not None:
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        keys = torch.cat([keys, relative.table[..., None].to(keys.dtype)], dim=-1)
    M, N = q.shape[2], keys.shape[1]
    # Column x has distance N - 1 - x. Rows of N + 1, read as rows of N, are shifted by one each.
    products = q @ nn.functional.pad(keys.flip(1), (0, 0, 0, 1)).mT
    bias: Tensor = products.flatten(2)[..., M - 1 : M - 1 + M * N].unflatten(2, (M, N))
    return bias


def _compiled_flex() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


# Sparse patterns and hashing.

STRIDE = 128
PATTERNS = {
    "local": SparsePattern(kind="local", stride=STRIDE),
    "strided": SparsePattern(kind="strided", stride=STRIDE),
    "strided, split heads": SparsePattern(kind="strided", stride=STRIDE, combination="split"),
    "fixed, c = 32": SparsePattern(kind="fixed", stride=STRIDE, summaries=32),
    "fixed, c = 8": SparsePattern(kind="fixed", stride=STRIDE, summaries=8),
    "fixed, c = 8, 2 subblocks": SparsePattern(
        kind="fixed", stride=STRIDE, summaries=8, subblocks=2
    ),
}
COMPARED = 256
"""Number of queries that are compared with a dense mask"""
CHUNK = 64
ROUNDS = (1, 2, 4)
HASHED = 1024
"""Number of tokens that are compared with dense attention"""


def sparse(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures causal attention and every pattern.

    Raises:
        AssertionError: the last queries of a pattern differ from attention with a dense mask.
    """
    inputs, errors, sizes = projected_inputs(case), {}, {}
    q, k, v, _ = inputs
    start = max(0, case.N - COMPARED)
    attends = {name: partial(sparse_attention, pattern=each) for name, each in PATTERNS.items()}
    for name, pattern in PATTERNS.items():
        mask = Mask.dense(pattern.visible(case.H_q, case.N, start=start))
        expected = attention(q[:, :, start:], k, v, mask=mask)
        got = attends[name](q, k, v)[:, :, start:]
        errors[name] = relative_error(name, got, expected, BOUND)
        share = shown_share(pattern, case)
        sizes[name] = replace(case, share=share, mask_name=pattern.kind)
    for direction in BOTH:
        patterns = attention_contenders(case, direction, attends, inputs, errors)
        yield run.timed(
            _causal(case, direction, inputs)
            + [replace(one, case=sizes[one.variant]) for one in patterns]
        )


def shown_share(pattern: SparsePattern, case: Case) -> float:
    """Fraction of the M x N pairs that a pattern shows, on average over the heads."""
    shown = 0
    for start in range(0, case.N, COMPARED):
        end = min(start + COMPARED, case.N)
        shown += int(pattern.visible(case.H_q, end, start=start).sum())
    return shown / (case.H_q * case.N**2)


def selected(case: Sizes, run: Run, *, size: int, alike: int) -> Iterator[Measurement]:
    """Measures lists of random blocks of `size` keys, which `alike` queries in a row share, against
    the same pairs as a dense mask, and against no mask.

    Raises:
        AssertionError: the results differ.
    """
    inputs, blocks = case.inputs(), case.N // size
    count = round(case.share * blocks)
    rows = [torch.randperm(blocks)[:count].sort().values for _ in range(0, case.M, alike)]
    mask = Mask.selected(torch.stack(rows).repeat_interleave(alike, dim=0)[None, : case.M], size)
    dense = Mask.dense(mask.materialize(1, 1, case.M, case.N))
    attends: dict[str, Attend] = {
        "lists": partial(attention, mask=mask),
        "dense": partial(attention, mask=dense),
    }
    with torch.no_grad():
        got, expected = (attend(*inputs[:3]) for attend in attends.values())
    errors = {"lists": relative_error(case.name, got, expected, BOUND)}
    attends["no mask"] = attention
    if case.M == 1:
        attends["listed rows"] = copies_of_rows(rows[0], inputs)
    for direction in BOTH[: 1 if case.M == 1 else 2]:
        yield run.timed(attention_contenders(case, direction, attends, inputs, errors))


def copies_of_rows(keys: Tensor, inputs: Inputs) -> Attend:
    """Returns a copy of the listed rows of k and v, which is the least that reading them takes."""
    heads, N = inputs.k.shape[1:3]
    rows = (torch.arange(heads)[:, None] * N + keys).flatten()
    copies = [x.new_empty(len(rows), x.shape[3]) for x in (inputs.k, inputs.v)]

    def copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for x, to in zip((k, v), copies, strict=True):
            torch.index_select(x.flatten(0, 2), 0, rows, out=to)
        return copies[1]

    return copy


def reformer(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures causal attention, and attention by hashing with each number of rounds.

    Raises:
        AssertionError: a result differs from dense attention to the same keys.
    """
    attends = {f"hashed, {n} rounds": partial(hashed, rounds=n) for n in ROUNDS}
    few, errors = projected_inputs(replace(case, M=HASHED, N=HASHED))[:3], {}
    for name, one in attends.items():
        expected = one(*few, attn_implementation="eager")
        errors[name] = relative_error(name, one(*few), expected, BOUND)
    inputs, own = projected_inputs(case), replace(case, share=math.nan, mask_name="hashed")
    for direction in BOTH:
        rounds = attention_contenders(own, direction, attends, inputs, errors)
        yield run.timed(_causal(case, direction, inputs) + rounds)


def hashed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rounds: int,
    attn_implementation: AttnImplementation = "fused",
) -> Tensor:
    """Attention by hashing, which does not use k; the same hashes at every call."""
    buckets = hash_buckets(
        q,
        rounds=rounds,
        buckets=default_buckets(q.shape[2], CHUNK),
        generator=torch.Generator().manual_seed(0),
    )
    order = sorted_by_bucket(buckets)
    return lsh_attention(q, v, order, chunk=CHUNK, attn_implementation=attn_implementation)


def reversible(case: Case, layers: int, run: Run) -> Iterator[Measurement]:
    """Measures a forward and backward pass of a stack, without gradients of weights, once.

    Raises:
        AssertionError: the gradients differ.
    """
    width = case.H_q * case.D
    stack = ReversibleStack(ReformerBlock(width, case.H_q, chunk=CHUNK) for _ in range(layers))
    stack.requires_grad_(False)
    x = torch.randn(case.B, case.M, width, requires_grad=True)

    def call(*, is_reversible: bool) -> Callable[[], Tensor]:
        def gradient() -> Tensor:
            stack.reversible = is_reversible
            outputs = stack(x, x, rounds=2, generator=torch.Generator().manual_seed(0))
            return torch.autograd.grad(sum(outputs).sum(), x)[0]

        return gradient

    names = {"reversible": True, "plain autograd": False}
    calls = {name: partial(lambda one: one, call(is_reversible=is_)) for name, is_ in names.items()}
    yield run.timed(checked_calls(case, "fwd+bwd", calls, 1e-2), Budget(0.0, fewest=1))


def _causal(case: Case, direction: Direction, inputs: Inputs) -> list[Contender]:
    attends = {"causal": partial(attention, mask=Mask.causal())}
    return attention_contenders(case, direction, attends, inputs, {})


# Transformer-XL.

STEPS: dict[str, AttnImplementation] = {
    "naive": "eager",
    "sdpa": "sdpa",
    "dense bias": "fused",
    "cpu": "fused",
}


def transformer_xl(config: TransformerXLConfig, batch: int, run: Run) -> Iterator[Measurement]:
    """Measures the gradients with naive attention, torch's, and ours with the scores by distance as
    a dense bias or as relative keys. All have the same weights.

    Raises:
        AssertionError: a gradient of the position bias differs from that of naive attention.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
    memories = tuple(
        torch.randn(batch, config.memory, config.width, generator=generator)
        for _ in range(config.layers)
    )
    models = {name: TransformerXL(config, attn_implementation=path) for name, path in STEPS.items()}
    calls = {}
    for name, model in models.items():
        model.load_state_dict(models["naive"].state_dict())
        function = with_dense_bias if name == "dense bias" else attend
        calls[name] = partial(_step, model, tokens, memories, function)
    D = config.width // config.heads
    case = Sizes(
        name="transformer-xl", B=batch, H_q=config.heads, H_kv=config.heads,
        M=config.context, N=config.memory + config.context, D=D, D_v=D,
    )  # fmt: skip
    yield run.timed(checked_calls(case, "fwd+bwd", calls, 1e-3))


def with_dense_bias(
    q: Tensor, k: Tensor, v: Tensor, *, relative: RelativeKeys, scale: float, **options: Any
) -> Tensor:
    """`attend` with the scores by distance stored as a bias (B, H, M, N)."""
    return attend(q, k, v, bias=causal_bias(q, relative, scale), scale=scale, **options)


def _step(
    model: TransformerXL,
    tokens: Tensor,
    memories: tuple[Tensor, ...],
    attention: Callable[..., Tensor],
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with mock.patch.object(relative_attention, "attend", attention):
            logits, _ = model(tokens[:, :-1], memories)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            gradients = torch.autograd.grad(loss, [model.position_bias, *model.parameters()])
        return gradients[0]

    return step
