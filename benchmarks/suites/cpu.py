"""Cases of the goals on a CPU: torch's SDPA, masks, options, decoding, short calls and threads.

Goals select cases by the prefix of their names. Budgets are half of those of other suites, because
this one has three times as many cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu_cases import cost_masks
from benchmarks.runner.caches import Caches
from benchmarks.runner.ceilings import products, reading
from benchmarks.runner.checks import check_at, check_quickly
from benchmarks.runner.record import case_id
from benchmarks.runner.run import Comparison, Measurement, NotMeasuredError, Run
from benchmarks.runner.without_amx import measure_without_amx
from benchmarks.suites.attention import DTYPES, MASKS
from transformer_kernels.backends.native import extension
from transformer_kernels.bench import Case, Direction, usable_variants
from transformer_kernels.bench.contenders import Contender, check
from transformer_kernels.bench.provenance import device_slug
from transformer_kernels.bench.workload import Workload
from transformer_kernels.masks.mask import Mask

COST_LENGTH = 2048
BLOCK = 64
NAIVE_ROUNDS = 2
"""Few rounds: naive attention is up to 100 times slower than the others, and no goal uses it."""
CALL_ROUNDS = 2000
"""Maximum number of rounds for calls that take microseconds."""
CHECKED_LENGTH = 256
"""Length at which options are checked: at the timed length, plain torch takes half a minute for the
dropout bits."""
BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")
OURS = ("naive", "cpu")


def comparisons() -> Iterator[Comparison]:
    for case in sdpa_cases():
        yield _comparison(f"against_sdpa-{case_id(case)}", against_sdpa, case)
    for dtype in DTYPES:
        yield _comparison(f"masks-{str(dtype)[6:]}", masks, mask_cases(dtype))
    for dtype in DTYPES:
        yield _comparison(f"options-{str(dtype)[6:]}", options, dtype)
    for case in decode_cases():
        yield _comparison(f"decode-{case_id(case)}", decode, case)
        yield _comparison(f"caches-{case_id(case)}", caches, case)
    for case in short_cases():
        yield _comparison(case_id(case), short, case)
    for case in scaling_cases():
        yield _comparison(case_id(case), scaling, case)


def _comparison(
    name: str, measure: Callable[..., Iterator[Measurement]], *of: object
) -> Comparison:
    def measurements(run: Run) -> Iterator[Measurement]:
        if (reason := extension.unavailable_reason()) is not None:
            raise NotMeasuredError(reason)
        yield from measure(*of, run)

    return Comparison(name=name, measurements=measurements)


def sdpa_cases() -> list[Case]:
    """From short batched sequences to long ones, wide heads."""
    return [
        Case(
            name=name, B=B, M=length, N=length, D=D, D_v=D,
            dtype=dtype, mask=mask, mask_name=mask_name,
        )
        for dtype in DTYPES
        for B, length, D in ((4, 512, 64), (1, 2048, 64), (1, 4096, 128))
        for name, (mask, mask_name) in MASKS.items()
    ]  # fmt: skip


def against_sdpa(case: Case, run: Run) -> Iterator[Measurement]:
    """All variants, beside a matrix product; then ours and SDPA without AMX, if the CPU has it."""
    checked = check_quickly(case, run.usable())
    for direction in BOTH:
        contenders = checked.contenders(direction, naive_rounds=NAIVE_ROUNDS)
        yield run.timed([*contenders, *products(case, direction)], run.share(0.5))
    if device_slug().endswith("-amx"):
        for direction in BOTH:
            yield partial(measure_without_amx, case, checked.expected, direction, run)


def mask_cases(dtype: torch.dtype) -> list[Case]:
    S = COST_LENGTH
    return [
        Case(name=name, M=S, N=S, dtype=dtype, mask=mask, mask_name=kind)
        for name, kind, mask in cost_masks(1, S, BLOCK)
    ]


def masks(cases: list[Case], run: Run) -> Iterator[Measurement]:
    """All masks in the same rounds, because the cost of a mask is a ratio."""
    checked = [check(case, usable_variants(OURS)) for case in cases]
    for direction in BOTH:
        yield run.timed(
            [one for each in checked for one in each.contenders(direction, ["cpu"])], run.share(0.5)
        )


def option_cases(dtype: torch.dtype) -> list[Case]:
    """No option, and each training option alone. The bias is (1, H, S, S)."""
    S, H = COST_LENGTH, 8
    bias = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(1)).to(dtype)
    learned = bias.clone().requires_grad_()
    return [
        Case(name="options: none", M=S, N=S, dtype=dtype),
        Case(name="options: dropout 0.1", M=S, N=S, dtype=dtype, dropout_p=0.1),
        Case(name="options: bias", M=S, N=S, dtype=dtype, bias=bias),
        Case(name="options: bias and its gradient", M=S, N=S, dtype=dtype, bias=learned),
    ]


def options(dtype: torch.dtype, run: Run) -> Iterator[Measurement]:
    checked = [
        check_at(CHECKED_LENGTH, case, usable_variants(OURS)) for case in option_cases(dtype)
    ]
    contenders = [one for each in checked for one in each.contenders("fwd+bwd", ["cpu"])]
    yield run.timed(contenders, run.share(0.5))


def decode_cases() -> list[Case]:
    """Decoding of a language model: one query per head against a long cache."""
    return [
        Case(name="decode", B=B, H_q=H_q, H_kv=8, M=1, N=N, D=D, D_v=D, dtype=dtype)
        for dtype in DTYPES
        for B, H_q, N, D in ((1, 32, 8192, 128), (8, 8, 4096, 64))
    ]


def decode(case: Case, run: Run) -> Iterator[Measurement]:
    """Decoding, and a float32 sum over the same bytes, which is bandwidth-bound."""
    checked = check(case, run.usable())
    keys_and_values = torch.stack(checked.inputs[1:3])
    k, v = keys_and_values
    ready = replace(checked, inputs=checked.inputs._replace(k=k, v=v))
    fused = [name for name in checked.attends if name != "naive"]
    contenders = [*ready.contenders("fwd", fused), reading(case, keys_and_values)]
    yield run.timed(contenders, run.share(0.5))


def caches(case: Case, run: Run) -> Iterator[Measurement]:
    """`attention_decode` with contiguous and paged caches, and in int8."""
    of_case = Caches(case)
    contenders = [*of_case.ours("cpu", "cpu"), of_case.int8("cpu", "cpu")]
    yield run.timed(contenders, run.share(0.5))


def short_cases() -> list[Case]:
    """Short sequences, dominated by the overhead of a call."""
    return [
        Case(name="short", B=B, H_q=H, H_kv=H, M=S, N=S, D=D, D_v=D, dtype=dtype)
        for dtype in DTYPES
        for B, H, S, D in ((32, 8, 64, 32), (1, 1, 16, 64))
    ]


def short(case: Case, run: Run) -> Iterator[Measurement]:
    checked = check_quickly(case, run.usable())
    for direction in BOTH:
        yield run.timed(checked.contenders(direction), replace(run.share(0.5), most=CALL_ROUNDS))


def scaling_cases() -> list[Case]:
    """Cases for thread scaling: many heads with uneven rows, and a single head."""
    return [
        case
        for dtype in (torch.bfloat16, torch.float32)
        for case in (
            Case(
                name="scaling: causal", M=2048, N=2048, dtype=dtype,
                mask=Mask.causal(), mask_name="causal",
            ),
            Case(name="scaling: one head", H_q=1, H_kv=1, M=4096, N=4096, dtype=dtype),
        )
    ]  # fmt: skip


def scaling(case: Case, run: Run) -> Iterator[Measurement]:
    checked, threads = check_quickly(case, usable_variants(OURS)), torch.get_num_threads()
    try:
        for direction in BOTH:
            (one,) = checked.contenders(direction, ["cpu"])
            yield run.timed([with_threads(one, count) for count in (1, 2)], run.share(0.5))
    finally:
        torch.set_num_threads(threads)


def with_threads(contender: Contender, threads: int) -> Contender:
    """Sets the number of threads and adds an untimed run, to wake threads and warm up caches."""

    def prepare() -> Workload:
        torch.set_num_threads(threads)
        contender.prepare()()
        return contender.prepare()

    return replace(contender, prepare=prepare, threads=threads)
