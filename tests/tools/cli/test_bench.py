from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.bench import VARIANTS, Attend, Case, read_rows

SMALL = ["--shape", "1,2,1,8,8,16", "--seconds", "0.01", "--tolerance", "inf"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the machine and the probe, in less time."""
    for module in ("limits", "steadiness"):
        monkeypatch.setattr(f"transformer_kernels.bench.{module}.SIDES", {"cpu": 32})
        monkeypatch.setattr(f"transformer_kernels.bench.{module}.BYTES", {"cpu": 2**14})


def bench(out: Path, *words: str) -> int:
    return cli.main(["bench", *SMALL, "--out", str(out), *words])


@pytest.mark.quick
@pytest.mark.usefixtures("without_memory")
def test_table_rows_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert bench(out, "--mask", "full", "--mask", "window:3", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr().out
    assert "B 1, H 2/1, S 8, D 16, window:3, bfloat16, forward + backward" in printed
    assert str(out / "report.html") in printed
    rows = read_rows(out / "rows.csv")
    assert [(row.mask, row.direction, row.variant, row.dtype) for row in rows] == [
        (mask, direction, variant, "bfloat16")
        for mask in ("full", "window:3")
        for direction in ("fwd", "fwd+bwd")
        for variant in ("naive", "sdpa", "cpu")
    ]
    assert "fused (cpu)" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("without_memory")
def test_peers_and_passes_are_chosen(tmp_path: Path) -> None:
    assert bench(tmp_path, "--against", "sdpa", "--pass", "backward", "--pass", "backward") == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert [(row.direction, row.variant, row.mask) for row in rows] == [
        ("bwd", "sdpa", "causal"),
        ("bwd", "cpu", "causal"),
    ]


@pytest.mark.usefixtures("without_memory")
def test_shapes_of_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_head": 2, "n_embd": 32, "n_positions": 16}), encoding="utf-8")
    words = ["bench", "--model", str(config), "--batch", "3", *SMALL[2:], "--out", str(tmp_path)]
    assert cli.main(words) == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert list(dict.fromkeys((r.case, r.B, r.M, r.N, r.D, r.direction) for r in rows)) == [
        ("model, prefill", 3, 16, 16, 16, "fwd"),
        ("model, prefill", 3, 16, 16, 16, "fwd+bwd"),
        ("model, decoding", 3, 1, 16, 16, "fwd"),
    ]


@pytest.mark.usefixtures("without_memory")
def test_saved_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert bench(tmp_path, "--save", str(before)) == 0
    saved = json.loads(before.read_text(encoding="utf-8"))
    for path, of_fused in ((before, 2.0), (after, 3.0)):
        for one in saved["measured"]:
            one["laps"] = [of_fused if one["row"]["variant"] == "cpu" else 1.0] * 5
        path.write_text(json.dumps(saved), encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["bench", "--compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("slower") == 2
    assert "4 of 6 figures that both runs have did not change." in printed
    assert bench(tmp_path, "--compare", str(before)) == 0
    assert "of 6 figures that both runs have" in capsys.readouterr().out


@pytest.mark.usefixtures("without_memory")
def test_disturbed_calls_are_shown_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every probe after the first one is slower than the last."""
    from transformer_kernels.bench.comparison import run
    from transformer_kernels.bench.steadiness import Speed

    seconds = iter(range(1, 100))
    monkeypatch.setattr(run, "Probe", lambda _device: lambda: Speed(float(next(seconds)), 1.0))
    assert bench(tmp_path, "--tolerance", "5") == 0
    printed = capsys.readouterr().out
    assert "slower than usual" in printed.partition("Disturbed:")[2]
    assert len(read_rows(tmp_path / "rows.csv")) == 6


@pytest.mark.usefixtures("without_memory")
def test_failure_of_ours_is_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case) -> Attend:
        right = VARIANTS["sdpa"].attend_for(case)
        return lambda q, k, v: right(q, k, v) + 0.5

    monkeypatch.setitem(VARIANTS, "cpu", replace(VARIANTS["cpu"], attend_for=wrong))
    assert bench(tmp_path) == 1
    assert "fused (cpu) FAILED: cpu, : o (torch.float32): error 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "1,2"], "expected B,H_q,H_kv,M,N,D[,D_v], such as 1,32,8,2048,2048,128"),
        (["--mask", "casual"], "expected full, causal, window:W"),
        (["--mask", "padding:3,4"], "padding needs 1 lengths of at most 8"),
        (["--mask", "padding:nowhere"], "nowhere: No such file or directory"),
        (["--model", "nowhere.json"], "--model has its own shapes and masks"),
        (["--batch", "2"], "--batch and --context need --model"),
        (["--against", "sdpa,fa5"], "expected names of naive, sdpa, "),
        (["--against", "flex"], "--against flex: not on cpu: torch finds no CUDA device"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device"),
        (["--seconds", "0"], "--seconds must be positive and finite, got 0.0"),
        (["--tolerance", "0"], "--tolerance must be positive, got 0.0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--compare", "a", "b", "c"], "No such file or directory"),
    ],
)
def test_invalid_options(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.csv").exists()
