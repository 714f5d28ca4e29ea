"""Signatures of the operators, the choice of a backend (the first one that supports a call, or the
named one without fallback), and `explain`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_type, get_overloads, get_type_hints

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import NAMES
from tests.support.operators import FORWARD, operators_run_by
from transformer_kernels import _C, distributed
from transformer_kernels.backends import BACKENDS, CudaBackend, TritonBackend
from transformer_kernels.backends.native import extension
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import choose as dispatch
from transformer_kernels.problem.cache import cache_problem
from transformer_kernels.problem.dense import dense_problem

ROOT = Path(tk.__file__).parents[1]


OPERATORS = (
    tk.attention,
    tk.attention_decode,
    tk.attention_varlen,
    tk.linear_attention,
    tk.linear_attention_varlen,
    distributed.ring_attention,
    distributed.all_to_all_attention,
    distributed.ring_attention_varlen,
)


def parameters(function: Callable[..., Any]) -> dict[str, object]:
    """Types of the parameters by name, those of unpacked options included."""
    hints = get_type_hints(function)
    hints.pop("return")
    options = hints.pop("options", None)
    return hints | (get_type_hints(options.__args__[0]) if options is not None else {})


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda x: x.__name__)
def test_overloads_have_the_parameters_of_the_implementation(operator: Callable[..., Any]) -> None:
    want = parameters(operator)
    (flag,) = (name for name in want if name.startswith("return_"))
    overloads = get_overloads(operator)
    assert len(overloads) == 3
    for one in overloads:
        assert parameters(one) | {flag: bool} == want
        defaults = inspect.signature(operator).parameters
        for name, parameter in inspect.signature(one).parameters.items():
            if parameter.default is not parameter.empty:
                assert parameter.default == defaults[name].default


@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_may_be_a_variable(flag: bool) -> None:
    x, packed, ends = torch.randn(1, 2, 3, 4), torch.randn(3, 2, 4), torch.tensor([0, 3])
    lengths = torch.tensor([3])
    either = tk.attention(x, x, x, return_lse=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(tk.attention(x, x, x), Tensor)
    assert_type(tk.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    results = [
        either,
        tk.attention_decode(x, x, x, lengths, return_lse=flag),
        tk.attention_varlen(packed, packed, packed, ends, return_lse=flag),
        tk.linear_attention(x, x, x, return_state=flag),
        tk.linear_attention_varlen(packed, packed, packed, ends, return_state=flag),
    ]
    assert [isinstance(x, tuple) for x in results] == [flag] * 5


def x() -> Tensor:
    return torch.randn(1, 2, 3, 4)


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        extension, "unavailable_reason", lambda: "the extension is not available (no luck)"
    )


def test_names() -> None:
    assert dispatch.names(BACKENDS)[:3] == ("auto", "cpu", "cuda")
    assert set(dispatch.names(BACKENDS)[3:]) == {"triton", "reference"}


def test_auto_runs_the_compiled_kernels() -> None:
    explanation = tk.explain(x(), x(), x())
    assert explanation.chosen == "cpu"
    assert explanation.kernel == f"csrc/cpu/attention/decode.h, {_C.isa()}, in float32"
    assert explanation.reasons["cpu"] == explanation.reasons["reference"] == ()
    assert "reference: supported, not chosen" in str(explanation).splitlines()
    assert operators_run_by(lambda: tk.attention(x(), x(), x()))[FORWARD] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_named_backend_runs(name: str) -> None:
    ran = operators_run_by(lambda: tk.attention(x(), x(), x(), backend=name))
    assert ran[FORWARD] == (name == "cpu")
    assert tk.explain(x(), x(), x(), backend=name).chosen == name


def test_a_named_backend_never_falls_back() -> None:
    q = x().to("meta")
    with pytest.raises(
        ValueError, match="backend='cpu' does not support this call: the tensors are on meta"
    ):
        tk.attention(q, q, q, backend="cpu")
    explanation = tk.explain(q, q, q, backend="cpu")
    assert (explanation.chosen, explanation.kernel) == (None, None)
    assert "runs: nothing" in str(explanation)


def test_error_lists_every_reason(no_extension: None) -> None:
    q = x().to("meta")
    with pytest.raises(ValueError, match=r"does not support this call: .* meta; .*; the extension"):
        tk.attention(q, q, q, backend="cpu")


def test_auto_skips_backends_with_reasons() -> None:
    q = x().to("meta")
    explanation = tk.explain(q, q, q)
    assert explanation.chosen == "reference"
    assert len(explanation.reasons["cpu"]) == 1
    assert "cpu: the tensors are on meta" in str(explanation)
    assert tk.attention(q, q, q).is_meta


@pytest.mark.parametrize(
    ("capability", "kind", "dtype", "chosen"),
    [
        ((10, 0), "dense", torch.bfloat16, "triton"), ((10, 3), "dense", torch.float16, "triton"),
        ((10, 0), "dense", torch.float32, "cuda"), ((10, 0), "cache", torch.bfloat16, "cuda"),
        ((9, 0), "dense", torch.bfloat16, "cuda"), ((12, 0), "dense", torch.bfloat16, "cuda"),
    ],
)  # fmt: skip
def test_auto_prefers_triton_where_only_its_kernels_use_the_matrix_units(
    capability: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for backend in (CudaBackend, TritonBackend):
        monkeypatch.setattr(backend, "unsupported_reasons", lambda self, problem: [])
    q = x().to(dtype)
    lengths = torch.tensor([3])
    problem = dense_problem(q, q, q) if kind == "dense" else cache_problem(q, q, q, lengths)
    problem = replace(problem, shape=problem.shape._replace(device=torch.device("cuda", 0)))
    dispatch.prefers_triton.cache_clear()
    try:
        assert dispatch.choose(problem, "auto", BACKENDS).name == chosen
        assert dispatch.choose(problem, "cuda", BACKENDS).name == "cuda"
        reasons: dict[str, tuple[str, ...]] = {"cuda": (), "triton": ()}
        text = str(dispatch.Explanation(problem, chosen, "a kernel", reasons, ""))
        assert ("cuda: supported, not chosen: only triton uses" in text) == (chosen == "triton")
    finally:
        dispatch.prefers_triton.cache_clear()


def test_without_the_extension(no_extension: None) -> None:
    assert tk.attention(x(), x(), x()).shape == (1, 2, 3, 4)
    explanation = tk.explain(x(), x(), x())
    assert explanation.chosen == "reference"
    assert explanation.kernel == "torch.matmul, softmax, torch.matmul"
    with pytest.raises(RuntimeError, match=r"enable\(\) needs the CPU kernels, but .*no luck"):
        tk.enable()


def test_explanation_text(no_extension: None) -> None:
    v = torch.randn(1, 2, 3, 5)
    lines = str(tk.explain(x(), x(), v)).splitlines()
    assert [line for line in lines if not line.startswith("triton: ")] == [
        "q (1, 2, 3, 4)  k (1, 2, 3, 4)  v (1, 2, 3, 5)  torch.float32 on cpu",
        "runs: reference (torch.matmul, softmax, torch.matmul)",
        "path: general (v has another width than q)",
        "cpu: the extension is not available (no luck)",
        "cuda: the extension is not available (no luck)",
    ]


def test_learned_slopes_run_fused() -> None:
    """As a table by distance, only where their gradient is needed."""
    bias = tk.alibi(torch.ones(2, requires_grad=True))
    q, k, v = x(), x(), x()
    explanation = tk.explain(q, k, v, bias=bias)
    assert explanation.chosen == "cpu"
    assert explanation.problem.scores.relative_bias is not None
    with torch.no_grad():
        assert tk.explain(q, k, v, bias=bias).problem.scores.alibi_slopes is not None
        o = tk.attention(q, k, v, bias=bias, backend="cpu")
    assert_same_function(tk.attention(q, k, v, bias=bias, backend="cpu").detach(), o)


def test_relative_keys_are_resolved() -> None:
    """Keys of all distances in q's dtype, with a table in float32."""
    keys, table = torch.randn(1, 3, 4), torch.randn(2, 3)
    q = torch.randn(1, 2, 5, 4, dtype=torch.bfloat16)
    relative = tk.relative_keys(keys, table=table, lowest=-1)
    explanation = tk.explain(q, q, q, relative=relative, backend="cpu")
    assert explanation.chosen == "cpu"
    scores = explanation.problem.scores
    assert scores.relative_keys is not None
    assert scores.relative_bias is not None
    assert scores.relative_keys.shape == (1, 9, 4)
    assert scores.relative_keys.dtype == torch.bfloat16
    assert scores.relative_bias.shape == (2, 9)
    assert scores.relative_bias.dtype == torch.float32


def test_explain_covers_every_operator() -> None:
    packed, starts = torch.randn(9, 2, 4), torch.tensor([0, 3, 9])
    varlen = tk.explain(packed, packed, packed, starts, operator=tk.attention_varlen)
    assert varlen.chosen == "cpu"
    assert str(varlen).splitlines()[0] == (
        "q (2, 2, 6, 4)  k (2, 2, 6, 4)  v (2, 2, 6, 4)  torch.float32 on cpu  (varlen)"
    )
    pages, table = torch.randn(5, 2, 16, 4), torch.tensor([[3, 1, 4]])
    cached = tk.explain(
        x(), pages, pages, torch.tensor([40]),
        block_table=table, softcap=2.0, operator=tk.attention_decode,
    )  # fmt: skip
    assert cached.chosen == "cpu"
    assert cached.problem.shape.N == 48
    assert tk.explain(x(), x(), x(), operator=tk.attention).chosen == "cpu"


def test_explain_raises_the_errors_of_the_operator() -> None:
    with pytest.raises(
        ValueError, match="operator must be attention, attention_varlen, attention_decode"
    ):
        tk.explain(x(), x(), x(), operator=torch.matmul)
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcup'"):
        tk.explain(x(), x(), x(), softcup=2.0)
    with pytest.raises(TypeError, match="cache_seqlens"):
        tk.explain(x(), x(), x(), operator=tk.attention_decode)
    lengths = torch.tensor([3])
    with pytest.raises(ValueError, match="q must not require grad"):
        tk.explain(x().requires_grad_(), x(), x(), lengths, operator=tk.attention_decode)


def test_explain_has_no_side_effects() -> None:
    state = torch.get_rng_state()
    options: dict[str, Any] = {"scale": 0.1, "softcap": 2.0, "dropout_p": 0.5, "seed": 1}
    options |= {
        "return_lse": True,
        "mask": tk.Mask.causal(),
        "bias": torch.zeros(3, 3),
        "sinks": torch.zeros(2),
    }
    ran = operators_run_by(lambda: tk.explain(x(), x(), x(), **options))
    assert FORWARD not in ran
    assert "aten::matmul" not in ran
    torch.set_rng_state(state)
    tk.explain(torch.ones(1, 2, 3, 4), *(torch.ones(1, 2, 3, 4),) * 2, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.quick
def test_importing_the_root_imports_no_application_and_no_compiler() -> None:
    code = (
        "import sys, transformer_kernels\n"
        "heavy = ('nn', 'models', 'training', 'bench', 'demo', 'cli')\n"
        "found = [n for n in heavy if 'transformer_kernels.' + n in sys.modules]\n"
        "found += [n for n in ('matplotlib', 'rich', 'torch._dynamo') if n in sys.modules]\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
