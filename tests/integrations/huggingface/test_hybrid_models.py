"""Linear layers of hybrid models: as transformers computes them in torch, and only where asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.huggingface.families import built, compare
from tests.integrations.huggingface.hybrid_models import (
    CU_SEQLENS,
    LENGTHS,
    POSITIONS,
    REFUSED,
    SERVED,
    counted,
    output_of,
)
from tests.integrations.huggingface.tiny_models import (
    assert_close,
    error_of,
    errors_of_gradients,
    generated,
    gradients_of,
    tokens,
    transformers,
)
from transformer_kernels.integrations.huggingface import NAME, linear_layers, register
from transformer_kernels.integrations.huggingface.linear_layers import FUNCTIONS

pytestmark = pytest.mark.exhaustive  # `make test` does not install transformers

FILE = "transformers.models.{0}.modeling_{0}"


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    transformers()
    register()
    yield
    register()


def originals(family: str = "qwen3_next") -> dict[str, Any]:
    """Returns the functions and forward passes in the file of a family."""
    found = vars(sys.modules[FILE.format(family)])
    layers = {
        name: one.forward
        for name, one in found.items()
        if isinstance(one, type) and issubclass(one, torch.nn.Module)
    }
    return {name: found[name] for name in FUNCTIONS if name in found} | layers


@pytest.mark.parametrize("family", [*SERVED, *REFUSED])
def test_agrees_with_torch(family: str) -> None:
    """Outputs, gradients and greedy tokens, with each kind of padding."""
    outcome = compare(family)
    assert outcome.kind in ("agrees", "mixed", "without attention"), outcome


@pytest.mark.parametrize("family", SERVED)
def test_runs_our_operators(family: str) -> None:
    model = built(family, NAME)
    with counted() as calls:
        output_of(model, tokens(), use_cache=False)
    assert sum(calls.values()) > 0
    with counted() as calls, torch.no_grad():
        output_of(built(family, "eager"), tokens(), use_cache=False)
    assert sum(calls.values()) == 0


def test_steps_run_our_operators() -> None:
    model = built("qwen3_next", NAME)
    with counted() as calls:
        generated(model)
    assert calls["gated_delta_rule"] == calls["causal_conv1d"] == 1
    assert calls["gated_delta_rule_step"] == calls["causal_conv1d_step"] == 9


@pytest.mark.parametrize("family", ["olmo_hybrid", "bamba", "mamba2", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(family: str, dtype: torch.dtype) -> None:
    """float64 is computed in float64, which transformers does not do."""
    text = tokens()
    exact = output_of(built(family, "eager"), text, use_cache=False)
    ours = output_of(built(family, NAME).to(dtype), text, use_cache=False)
    theirs = output_of(built(family, "eager").to(dtype), text, use_cache=False)
    allowed = 1e-5 if dtype == torch.float64 else 2 * error_of(theirs.float(), exact)
    assert_close(ours.to(exact.dtype), exact, max(allowed, 2e-2 * (dtype == torch.bfloat16)))


@pytest.mark.parametrize("family", ["olmo_hybrid", "bamba"])
def test_training_step_of_bfloat16_parameters_under_autocast(family: str) -> None:
    model, text = built(family, NAME).train(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(text, labels=text, use_cache=False)
    found.loss.backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
    assert_close(found.logits.float(), model(text, use_cache=False).logits, 0.1)


def separated(model: Any, text: Tensor) -> Tensor:
    parts = text.split(LENGTHS, dim=1)
    return torch.cat([output_of(model, part, use_cache=False) for part in parts], dim=1)


@pytest.mark.parametrize("family", SERVED)
def test_packed_documents_are_separate(family: str) -> None:
    """By positions, with a cache and without, by lengths, and in one of two rows."""
    model, text = built(family, NAME), tokens(21, batch=2)
    expected = separated(model, text[:1])
    for use_cache in (False, True):
        packed = output_of(model, text[:1], position_ids=POSITIONS, use_cache=use_cache)
        assert_close(packed, expected)
    by_length = {"cu_seq_lens_q": CU_SEQLENS, "position_ids": POSITIONS}
    assert_close(output_of(model, text[:1], **by_length, use_cache=False), expected)
    positions = torch.cat([POSITIONS, torch.arange(21)[None]])
    rows = output_of(model, text, position_ids=positions, use_cache=False)
    assert_close(rows[:1], expected)
    assert_close(rows[1:], output_of(model, text[1:], use_cache=False))


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba", "mamba2", "minimax"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_of_packed_documents(family: str, checkpoints: bool) -> None:
    """Gradient checkpointing calls the layers again, outside of the model."""
    model, text = built(family, NAME).train(), tokens(21, batch=1)
    expected = gradients_of(model, separated(model, text))
    model.zero_grad()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = output_of(model, text, position_ids=POSITIONS, use_cache=False)
    errors = errors_of_gradients(gradients_of(model, packed), expected)
    assert max(errors.values()) <= 1e-4, errors


def test_documents_by_index() -> None:
    model, text = built("bamba", NAME), tokens(21, batch=1)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]
    packed = output_of(model, text, position_ids=POSITIONS, seq_idx=index.int(), use_cache=False)
    assert_close(packed, separated(model, text))


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "minimax"])
def test_packed_documents_after_cached_tokens(family: str) -> None:
    """The first document continues the cached one; the state after the last one is that of it."""
    model = built(family, NAME)
    layer = next(one for one in model.modules() if hasattr(one, "_config_of_model"))
    argument = "past_key_values" if family == "minimax" else "cache_params"
    x = torch.randn(1, 21, model.config.hidden_size)
    bounds = torch.tensor([0, 7, 16], dtype=torch.int32)
    given: dict[str, Any] = {"attention_mask": None}
    if family == "minimax":
        given["position_embeddings"] = None
    cache = model(tokens(1, batch=1), use_cache=True).past_key_values
    if family == "minimax":
        cache.linear_cache.clear()
    else:
        cache.reset()

    def call(part: Tensor, **more: Any) -> Tensor:
        found = layer(part, **given, **more)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    with torch.no_grad():
        whole, alone = call(x[:, :12]), call(x[:, 12:])
        call(x[:, :5], **{argument: cache})
        after = call(x[:, 5:], **{argument: cache}, cu_seq_lens_q=bounds)
        assert_close(after, torch.cat([whole[:, 5:], alone], dim=1))
        step = call(x[:, :1], **{argument: cache})
        assert_close(step, call(torch.cat([x[:, 12:], x[:, :1]], dim=1))[:, -1:])


@pytest.mark.parametrize("family", REFUSED)
def test_layers_that_cannot_separate_documents(family: str) -> None:
    model, text = built(family, NAME), tokens(21, batch=1)
    output_of(model, text, position_ids=torch.arange(21)[None], use_cache=False)
    with pytest.raises(ValueError, match="cannot separate packed documents: pass one"):
        output_of(model, text, position_ids=POSITIONS, use_cache=False)


def test_documents_of_several_rows_start_with_the_row() -> None:
    model = built("qwen3_next", NAME)
    with pytest.raises(
        ValueError, match="cu_seq_lens_q must have a boundary at each of the 2 rows"
    ):
        model(tokens(21, batch=2), cu_seq_lens_q=torch.tensor([0, 30, 42]))


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba", "mamba2"])
def test_compiled_code(family: str) -> None:
    """In one graph, except that positions have to be looked at."""
    model, text = built(family, NAME), tokens(21, batch=1)
    whole, expected = output_of(model, text, use_cache=False), separated(model, text)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(output_of(compiled, text, use_cache=False), whole)
    packed = output_of(compiled, text, use_cache=False, cu_seq_lens_q=CU_SEQLENS)
    if family == "mamba2":  # has no positions
        assert_close(packed, expected)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(output_of(compiled, text, use_cache=False, position_ids=POSITIONS), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_export(family: str) -> None:
    model, text = built(family, NAME), tokens(21, batch=1)
    program = torch.export.export(model, (text,), {"use_cache": False})
    assert_close(program.module()(text, use_cache=False).logits, model(text).logits)


def test_what_is_replaced_is_restored() -> None:
    """And replaced again for the models that asked."""
    built("qwen3_next", "eager")
    register(linear_layers=False)
    before = originals()
    register()
    model = built("qwen3_next", "eager")
    model.set_attn_implementation(NAME)
    replaced = [name for name, one in originals().items() if one is not before[name]]
    assert replaced == [*list(FUNCTIONS)[:4], "Qwen3NextGatedDeltaNet", "Qwen3NextModel"]
    register(linear_layers=False)
    assert originals() == before
    with counted() as calls:
        model(tokens())
    assert sum(calls.values()) == 0
    register()
    with counted() as calls:
        model(tokens())
    assert calls["gated_delta_rule"] == 1


def test_other_models_of_the_process_run_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "_requested", set())
    theirs = built("bamba", "eager")
    register(linear_layers=False)
    before = originals("bamba")
    built("qwen3_next", NAME)
    assert originals("bamba") == before
    ours = built("bamba", NAME)
    with counted() as calls:
        theirs(tokens())
    assert sum(calls.values()) == 0
    with counted() as calls:
        ours(tokens())
    assert calls["linear_attention"] == 1


def test_all_models_of_the_process() -> None:
    """Also those made before, with the attention of torch."""
    models = [built("qwen3_next", "sdpa")]
    expected = models[0](tokens()).logits
    register(linear_layers=True)
    models.append(type(models[0])(models[0].config).eval())
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        with counted() as calls:
            assert_close(model(tokens()).logits, expected)
        assert calls["gated_delta_rule"] == 1
    register()
    with counted() as calls:
        models[0](tokens())
    assert sum(calls.values()) == 0


def test_the_argument_of_register() -> None:
    with pytest.raises(TypeError, match="linear_layers must be True or False"):
        register(linear_layers=1)  # type: ignore[arg-type]


def test_without_a_gpu_fla_is_not_called(tmp_path: Path) -> None:
    """transformers takes the functions of fla where it is installed, which fail there."""
    package = tmp_path / "fla/ops/gated_delta_rule"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text(FLA if folder == package else "")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["0", "active", "drivers", "ours"], found.stderr


FLA = """
def chunk_gated_delta_rule(q, k, v, g, beta, **rest):
    raise RuntimeError("0 active drivers")
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
PROGRAM = """
import torch
from tests.integrations.huggingface.families import built
from tests.integrations.huggingface.tiny_models import generated, tokens
try:
    built("qwen3_next", "eager")(tokens())
except RuntimeError as error:
    print(error)
generated(built("qwen3_next", "transformer_kernels"))
print("ours")
"""
