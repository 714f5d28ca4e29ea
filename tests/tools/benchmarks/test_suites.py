"""Every suite at toy sizes: the rows of its comparisons, and the checks before them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.conftest import SUITES, comparisons
from benchmarks.runner import ranks, without_amx
from benchmarks.runner.checks import Sizes, causal_sizes
from benchmarks.runner.record import case_id
from benchmarks.runner.run import Measurement, Run
from benchmarks.suites import (
    cpu,
    drop_in,
    host,
    huggingface,
    layers,
    linear,
    masks,
    models,
    training,
)
from benchmarks.suites import distributed as divided
from tests.support.backends import ISAS
from tests.tools.bench.example import PROVENANCE
from tests.tools.benchmarks.measuring import BUDGET, Measure, measured, variants
from transformer_kernels import attention as fused
from transformer_kernels import linear_attention
from transformer_kernels.backends.native import cuda_support
from transformer_kernels.bench import Case, Row, usable_variants
from transformer_kernels.bench.comparison.calls import Call, Shape
from transformer_kernels.bench.contenders import Expected, check
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.integrations import torch_jagged
from transformer_kernels.integrations.flash_attn import flash_attn_with_kvcache
from transformer_kernels.models import GeneratorConfig, TransformerXLConfig
from transformer_kernels.nn import sparse_attention
from transformer_kernels.training import PRESETS, Trainer
from transformer_kernels.training.trainer import Step


@pytest.mark.parametrize("suite", [one for one in SUITES if one != "huggingface"])
def test_names_of_comparisons_are_unique(suite: str) -> None:
    """Recorded rows of one comparison would otherwise replace those of another."""
    names = [one.name for one in comparisons(suite)]
    assert len(set(names)) == len(names) > 0


# Attention.


def test_every_query_sees_a_key() -> None:
    """Otherwise naive attention gives NaN, which cannot be compared."""
    of_models = [call.checked_case() for call in models.calls()]
    for case in (*masks.cases(), *cpu.mask_cases(torch.float32), *of_models):
        if case.mask is not None:
            visible = case.mask.materialize(case.B, 1, case.M, case.N)
            assert visible.any(dim=-1).all(), case_id(case)


def test_masks_cover_the_range_of_visible_fractions() -> None:
    fractions = sorted(case.visible for case in masks.cases())
    assert fractions[0] < 0.05
    assert fractions[-1] == 1.0
    assert max(b - a for a, b in pairwise(fractions)) <= 0.5
    costs = [case.visible for case in cpu.mask_cases(torch.float32)]
    assert costs == pytest.approx([1.0, 0.5, 0.125, 0.25, 0.5], abs=0.01)


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (cpu.against_sdpa, ["naive", "sdpa", "cpu", "gemm"]),
        (cpu.short, ["naive", "sdpa", "cpu"]),
        (cpu.scaling, ["cpu", "cpu"]),
        (cpu.decode, ["sdpa", "cpu", "sum"]),
    ],
)
def test_the_suite_cpu(
    measure: Callable[..., Iterator[Measurement]],
    names: list[str],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "device_slug", lambda: "epyc-avx2")  # without AMX: a test of its own
    case = Case(name="full", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8)
    threads = torch.get_num_threads()
    rows = measured(run, partial(measure, case))
    assert torch.get_num_threads() == threads
    assert variants(rows) == names
    assert variants(rows, "fwd+bwd") == ([] if measure is cpu.decode else names)
    if measure is cpu.scaling:
        assert [row.threads for row in rows] == [1, 2, 1, 2]


def test_masks_and_options_run_in_the_same_rounds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [replace(Case(name=name, H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8)) for name in "ab"]
    rows = measured(run, partial(cpu.masks, cases))
    assert [(row.case, row.direction) for row in rows] == [
        (case, direction) for direction in ("fwd", "fwd+bwd") for case in "ab"
    ]
    monkeypatch.setattr(cpu, "CHECKED_LENGTH", 16)
    monkeypatch.setattr(cpu, "COST_LENGTH", 32)
    rows = measured(run, partial(cpu.options, torch.float32))
    assert [row.case for row in rows] == [case.name for case in cpu.option_cases(torch.float32)]
    assert [row.dropout_p for row in rows] == [0.0, 0.1, 0.0, 0.0]


def test_calls_of_models_are_measured_beside_their_ceiling(run: Run) -> None:
    call = Call(name="a model", shape=Shape.parse("1,2,2,1,16,8"), mask="full")
    rows = measured(run, partial(models._measurements, call))
    assert variants(rows) == ["naive", "sdpa", "cpu", "sum"]
    assert variants(rows, "fwd+bwd") == ["naive", "sdpa", "cpu"]


@pytest.mark.exhaustive
def test_host_time_of_short_calls(run: Run) -> None:
    assert variants(measured(run, host.cpu), "fwd+bwd") == [
        "naive",
        "sdpa",
        "cpu",
        "empty function",
    ]
    found = variants(measured(run, host.cuda))
    assert found == 2 * ["cuda: direct", "cuda: operators", "empty function"]
    assert cuda_support.libraries["cpu"].direct is not None
    x = torch.ones(1, 1, 3, 8)
    assert torch.equal(fused(x, x, x, backend="cuda"), x), "kernels run again"


def test_without_amx(run: Run) -> None:
    if without_amx.ISA not in ISAS:
        return
    case = Case(name="full", H_q=2, H_kv=2, M=16, N=16, D=8, D_v=8, dtype=torch.bfloat16)
    expected = check(case, usable_variants(["naive"])).expected
    measure = partial(without_amx.measure_without_amx, case)
    rows = measure(expected, "fwd+bwd", run, "cpu")
    assert [(row.case, row.variant, row.suite) for row in rows] == [
        ("full, without AMX", "sdpa", "cpu"),
        ("full, without AMX", "cpu", "cpu"),
    ]
    wrong = Expected(*(of._replace(o=of.o + 1.0) for of in (expected.exact, expected.naive)))
    with pytest.raises(AssertionError, match="sdpa, full, without AMX: o"):
        measure(wrong, "fwd", run, "cpu")
    assert all(os.getenv(name) != value for name, value in without_amx.ENVIRONMENT.items())


# Linear attention.


@pytest.mark.parametrize("length", [160, 320])
def test_linear_attention_over_the_length(
    length: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LONGEST_CUMULATIVE", 200)
    case = linear.ChunkCase(name="linear attention", H_q=2, H_kv=2, M=length, N=length, D=8, D_v=8)
    rows = measured(run, partial(linear.over_length, case))
    installed = [name for name in ("fast-transformers", "fla") if name in variants(rows)]
    cumulative = ["cumulative sum"] * (length <= 200)
    names = ["causal", "cpu", "chunks", *cumulative, *installed, "gemm"]
    assert variants(rows) == variants(rows, "fwd+bwd") == names
    assert len(run.skipped) == 2 - len(installed)


def test_operations_of_linear_attention_are_those_of_its_chunks() -> None:
    """Forward: the lower triangles of q k^T and of its product with v, and two products with the
    state; three quarters of the triangles' tiles are computed."""
    case = linear.ChunkCase(name="", H_q=2, H_kv=2, M=128, N=128, D=8, D_v=8)
    triangles = 2 * 0.75 * 64 * 64 * 8
    states = 2 * 64 * 8 * 8
    assert case.operations("fwd") == 2 * 2 * 2 * (triangles + states)


# Layers.

TABLE = Case(name="relative table", H_q=2, H_kv=2, M=24, N=40, D=8, D_v=8)
KEYS = replace(TABLE, name="relative keys", mask=layers.CAUSAL, mask_name="causal")
SPARSE = replace(causal_sizes("", H=2, S=300, dtype=torch.float32), D=8, D_v=8)
XL = TransformerXLConfig(layers=2, heads=2, width=16, context=6, memory=5, dropout=0.0)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, FlexAttention reads uninitialized memory on some CPUs, and compiling takes 10 s."""
    monkeypatch.setattr(layers, "_compiled_flex", lambda: flex_attention)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("case", [TABLE, KEYS], ids=lambda case: case.name)
def test_relative_positions(case: Case, run: Run) -> None:
    rows = measured(run, partial(layers.relative, case))
    assert variants(rows) == ["none", "relative", "dense bias", "flex"]
    assert variants(rows, "fwd+bwd") == ["none", "relative", "dense bias"]


def test_flex_attention_is_left_out_if_it_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        o = flex_attention(q, k, v, **options)
        assert isinstance(o, Tensor)
        return o + 0.5 * (torch.arange(q.shape[2]) == 3)[:, None]

    monkeypatch.setattr(layers, "_compiled_flex", lambda: wrong)
    rows = measured(run, partial(layers.relative, TABLE))
    assert {row.variant for row in rows} == {"none", "relative", "dense bias"}
    assert "flex: error" in run.skipped[0]


def test_patterns_and_their_shares(run: Run) -> None:
    selected = partial(layers.selected, replace(SPARSE, N=64, share=0.125), size=8, alike=4)
    assert variants(measured(run, selected)) == ["lists", "dense", "no mask"]
    rows = measured(run, partial(layers.sparse, SPARSE))
    assert variants(rows) == variants(rows, "fwd+bwd") == ["causal", *layers.PATTERNS]
    causal, local, *others = rows[:7]
    assert causal.visible == 301 / 600
    assert local.visible == sum(min(i + 1, 128) for i in range(300)) / 300**2
    assert all(row.visible < causal.visible for row in others)


def test_hashing_and_reversible_layers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HASHED", 256)
    rows = measured(run, partial(layers.reformer, SPARSE))
    assert variants(rows) == ["causal", *(f"hashed, {n} rounds" for n in layers.ROUNDS)]
    size = Sizes(name="reformer layers: 2", H_q=1, H_kv=1, M=256, N=256, D=16, D_v=16)
    rows = measured(run, partial(layers.reversible, size, 2))
    assert variants(rows, "fwd+bwd") == ["reversible", "plain autograd"]


def test_transformer_xl(run: Run) -> None:
    rows = measured(run, partial(layers.transformer_xl, XL, 2))
    assert variants(rows, "fwd+bwd") == ["naive", "sdpa", "dense bias", "cpu"]
    assert {(row.B, row.M, row.N, row.H_q) for row in rows} == {(2, 6, 11, 2)}


# Adapters and models.

DROP_IN: list[tuple[Callable[[Sizes, Run], Iterator[Measurement]], Sizes, list[str]]] = [
    (drop_in.jagged, Sizes(name="jagged", B=8, H_q=2, H_kv=2, M=17, N=17),
     ["jagged", "padded", "cpu"]),
    (drop_in.crops, Sizes(name="", B=5, H_q=2, H_kv=2, M=3, N=17), ["sdpa", "split", "cpu"]),
    (drop_in.one_token, Sizes(name="", B=2, H_q=4, H_kv=2, M=1, N=32), ["sdpa", "cpu"]),
    (drop_in.pages, Sizes(name="", B=2, H_q=4, H_kv=2, M=20, N=64), ["packed", "cpu"]),
    (drop_in.short_call, Sizes(name="", H_q=4, H_kv=4, M=16, N=16), ["attention", "cpu"]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("measure", "sizes", "names"), DROP_IN, ids=[one.__name__ for one, _, _ in DROP_IN]
)
def test_adapters(
    measure: Callable[[Sizes, Run], Iterator[Measurement]],
    sizes: Sizes,
    names: list[str],
    dtype: torch.dtype,
    run: Run,
) -> None:
    rows = measured(run, partial(measure, replace(sizes, dtype=dtype)))
    assert variants(rows) == names
    assert variants(rows, "fwd+bwd") == (
        names if measure in (drop_in.jagged, drop_in.crops) else []
    )
    assert all(math.isnan(row.tflops) and row.error < 0.02 for row in rows)


@pytest.mark.exhaustive  # inductor compiles FlexAttention
def test_block_masks(run: Run) -> None:
    size = Sizes(name="block mask", H_q=2, H_kv=2, M=320, N=320)
    assert variants(measured(run, partial(drop_in.block_mask, size))) == ["flex", "cpu"]


SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 24, "intermediate_size": 16},
    "gemma2-2b": {"hidden_size": 32, "intermediate_size": 16, "head_dim": 8},
    "whisper-small": {"d_model": 24, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


def small(name: str) -> huggingface.Model:
    model = huggingface.MODELS[name]
    sizes = model.sizes | SMALL[name]
    return replace(model, sizes=sizes, batch=2, length=model.length and 24)


@pytest.mark.exhaustive  # `make test` does not install transformers
@pytest.mark.parametrize("name", SMALL)
def test_models_of_transformers(name: str, run: Run) -> None:
    rows = measured(run, partial(huggingface.compared, name, small(name), torch.float32))
    names = ["naive", *["sdpa"] * (name != "gemma2-2b"), "cpu", *["cpu-packed"] * (name == "bert")]
    kinds = {(row.case, row.direction): row for row in rows}
    assert [row.variant for row in rows] == names * len(kinds)
    assert len(kinds) == (3 if name == "gemma2-2b" else 2)
    assert ("gemma2-2b, decode" in {row.case for row in rows}) == (name == "gemma2-2b")
    assert len(run.skipped) == (name == "gemma2-2b")


@pytest.mark.exhaustive
def test_every_model_is_one_of_transformers() -> None:
    """The configurations are those that transformers accepts, with two layers."""
    import transformers

    for model in huggingface.MODELS.values():
        assert hasattr(transformers, f"{model.kind}Model")
        config = getattr(transformers, f"{model.kind}Config")(**model.sizes)
        assert config.get_text_config().num_hidden_layers == 2


TINY = replace(
    PRESETS["generator"]["demo"],
    task=replace(
        PRESETS["generator"]["demo"].task,
        model=GeneratorConfig(layers=1, width=16, heads=2, context=32),
    ),
    batch=2,
)


@pytest.mark.quick
def test_training_steps(run: Run) -> None:
    rows = measured(run, partial(training.steps, "generator demo", TINY))
    assert variants(rows, "step") == ["naive", "sdpa", "cpu"]
    for row in rows:
        assert (row.case, row.dtype, row.B, row.H_q, row.N, row.D) == (
            *("generator demo", "float32"), 2, 2, 32, 8,
        )  # fmt: skip
        assert math.isnan(row.tflops)
        assert row.error < 1e-4
    longer = training.with_context(TINY, 16, 64)
    assert (longer.task.model.context, longer.batch) == (16, 4)


def test_a_different_loss_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def wrong(trainer: Trainer) -> Step:
        done = step(trainer)
        is_fused = trainer.config.attn_implementation == "fused"
        return done._replace(loss=1.02 * done.loss) if is_fused else done

    monkeypatch.setattr(Trainer, "step", wrong)
    with pytest.raises(AssertionError, match=r"cpu: loss .*, expected"):
        measured(run, partial(training.steps, "generator demo", TINY))


def test_an_implementation_out_of_memory_is_skipped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def out_of_memory(trainer: Trainer) -> Step:
        if trainer.config.attn_implementation == "eager":
            raise torch.cuda.OutOfMemoryError("no 7 GiB more\nthis line is longer")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", out_of_memory)
    rows = measured(run, partial(training.steps, "generator demo", TINY))
    assert run.skipped == ["generator demo, 32: naive: no 7 GiB more"]
    assert variants(rows, "step") == ["sdpa", "cpu"]


# Wrong results.


def ten_percent_off(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: 1.1 * function(*arguments, **options)


WRONG: list[tuple[Any, str, Any, Measure]] = [
    (layers, "attention",
     lambda *x, **options: (1.1 if "relative" in options else 1.0) * fused(*x, **options),
     partial(layers.relative, TABLE)),
    (layers, "sparse_attention", ten_percent_off(sparse_attention),
     partial(layers.sparse, SPARSE)),
    (layers, "lsh_attention",
     lambda q, v, order, *, chunk, attn_implementation: v if attn_implementation == "fused" else q,
     partial(layers.reformer, SPARSE)),
    (layers, "with_dense_bias",
     lambda q, k, v, right=layers.with_dense_bias, **options: right(q, k, 2 * v, **options),
     partial(layers.transformer_xl, XL, 2)),
    (torch_jagged, "attention_varlen", ten_percent_off(attention_varlen),
     partial(drop_in.jagged, DROP_IN[0][1])),
    (drop_in, "flash_attn_with_kvcache", ten_percent_off(flash_attn_with_kvcache),
     partial(drop_in.one_token, DROP_IN[1][1])),
    (linear, "linear_attention",
     lambda *x, right=linear_attention, **options: (1.0 if options else 1.1)
     * right(*x, **options),
     partial(linear.over_length, linear.ChunkCase(name="", H_q=2, H_kv=2, M=64, N=64))),
]  # fmt: skip


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize(
    ("module", "name", "wrong", "measure"), WRONG, ids=[name for _, name, _, _ in WRONG]
)
def test_a_wrong_result_stops_a_comparison_before_it_is_timed(
    module: Any, name: str, wrong: Any, measure: Measure, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError, match="of the largest value"):
        measured(run, measure)
    assert run.rows == []


# Processes.


def started(measure: Callable[[ranks.Rank], list[Row]]) -> list[Row]:
    return ranks.start(2, measure, BUDGET, PROVENANCE, "a suite")


@pytest.mark.exhaustive
def test_divided_sequences_and_their_predictions() -> None:
    rows = started(partial(divided.sequence, 256, 40))
    names = ("ring, zigzag", "ring, contiguous", "ring, contiguous, window 40", "all-to-all")
    assert [(row.case.split(": ")[1], row.direction, row.variant) for row in rows] == [
        (name, direction, variant)
        for name in names
        for direction in ("fwd", "fwd+bwd")
        for variant in ("one process", name, "predicted")
    ]
    assert all(row.median_ms > 0 and row.threads == 2 for row in rows)
    for ours, predicted in zip(rows[1::3], rows[2::3], strict=True):
        assert ours.error < 1e-4
        sent = ours.gbytes_s * ours.median_ms
        assert sent == pytest.approx(predicted.gbytes_s * predicted.median_ms)
        assert sent > 0


@pytest.mark.exhaustive
def test_divided_documents() -> None:
    rows = started(partial(divided.documents, (100, 3, 1, 24)))
    names = ["one process", "ring_attention_varlen", "ring_attention, zigzag"]
    assert variants(rows) == variants(rows, "fwd+bwd") == names
    whole, documents, zigzag = (row.visible for row in rows[:3])
    assert 1.0 <= documents / whole < 1.05 < zigzag / whole


@pytest.mark.exhaustive
def test_many_tokens() -> None:
    for make, name, share in (
        (divided.window_of, "window of 16", 0.0039),
        (divided.strided, "strided by 16 blocks of 4", 0.0458),
    ):
        (row,) = started(partial(divided.million, make, 4096, 2, torch.float32))
        assert row.case == f"{name}, 2 processes"
        assert row.visible == pytest.approx(share, rel=0.05)
        assert row.error < 1e-5
