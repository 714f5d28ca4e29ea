"""The suite `delta` at toy sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import transformer_kernels
from benchmarks.report import delta as picture
from benchmarks.runner.run import Run
from benchmarks.suites import delta
from tests.tools.benchmarks.measuring import measured, variants
from transformer_kernels import gated_delta_rule
from transformer_kernels.bench import write_rows

DELTA = replace(delta.LAYER, H_q=1, H_kv=2, M=70, N=70, D=8, D_v=8)
PEERS = [False, pytest.param(True, marks=pytest.mark.exhaustive)]
"""`make test` does not install transformers."""


@pytest.fixture(params=PEERS, ids=["ours", "transformers"])
def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(delta, "peer", lambda *_: None)
    return bool(request.param)


def test_delta_rule_over_the_length(peers: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delta.LONGEST["fwd+bwd"], "transformers", 64)
    rows = measured(run, partial(delta.layers, DELTA))
    forms = [name for name in ("cpu", "transformers") if name == "cpu" or peers]
    names = [*forms, *(f"{name} by channel" for name in forms), "linear", "causal"]
    assert variants(rows) == names
    assert variants(rows, "fwd+bwd") == [name for name in names if name != "transformers"]
    heads = {row.variant: (row.H_q, row.H_kv) for row in rows}
    assert [heads[name] for name in ("cpu", "cpu by channel", "causal")] == [(1, 2), (2, 2), (2, 1)]


def test_steps_of_hybrid_layers(peers: bool, run: Run) -> None:
    rows = measured(run, partial(delta.steps, replace(DELTA, M=1, N=1)))
    forms = [name for name in ("cpu", "transformers") if name == "cpu" or peers]
    assert variants(rows) == [*forms, *(f"{name} by channel" for name in forms), "linear"]


def test_convolutions_of_hybrid_layers(peers: bool, run: Run) -> None:
    forms = [name for name in ("cpu", "transformers") if name == "cpu" or peers]
    channels = replace(delta.CHANNELS, H_q=6, H_kv=6, M=9, N=9)
    assert variants(measured(run, partial(delta.convolution_steps, channels))) == forms
    rows = measured(run, partial(delta.convolutions, channels))
    assert variants(rows) == variants(rows, "fwd+bwd") == 2 * forms


def test_without_transformers_the_reason_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "import_module", lambda name: import_module(f"missing.{name}"))
    assert delta.peer(run, "kimi_linear", "a function") is None
    assert run.skipped == ["transformers, a function: No module named 'missing'"]


def test_a_wrong_result_stops_a_comparison_before_it_is_timed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*tensors: Tensor, backend: str, **options: Any) -> Tensor:
        o: Tensor = gated_delta_rule(*tensors, backend=backend, **options)
        return o if backend == "reference" else 1.1 * o

    monkeypatch.setattr(transformer_kernels, "gated_delta_rule", wrong)
    with pytest.raises(AssertionError, match="of the largest value"):
        measured(run, partial(delta.layers, DELTA))
    assert run.rows == []


def test_the_picture_has_a_line_for_every_variant(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "peer", lambda *_: None)
    rows, image = tmp_path / "rows.csv", tmp_path / "a.svg"
    write_rows(rows, measured(run, partial(delta.layers, DELTA)))
    monkeypatch.setattr("sys.argv", ["delta", str(rows), str(image)])
    picture.main()
    text = image.read_text(encoding="utf-8")
    for name in ("gated_delta_rule", "by channel", "linear_attention", "causal attention"):
        assert name in text
    monkeypatch.setattr("sys.argv", ["delta", str(rows), str(image), "--dtype", "float16"])
    with pytest.raises(SystemExit):
        picture.main()
