"""Settings of runs, learning rate schedules, presets and learning curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.tiers import each
from transformer_kernels.models import SIZES
from transformer_kernels.training import (
    PRESETS,
    CurveRow,
    Dataset,
    Schedule,
    TrainConfig,
    Trainer,
    plot_curves,
    progress_bar,
    read_curve,
)
from transformer_kernels.training.curves import append_to_curve, rewrite_curve
from transformer_kernels.training.tasks import config_from_dict


def test_generator_presets_match_their_sources() -> None:
    assert {name: preset.task.model for name, preset in PRESETS["generator"].items()} == SIZES
    preset = PRESETS["generator"]["nanogpt-cpu"]
    assert (preset.batch, preset.steps, preset.task.model.dropout) == (12, 2000, 0.0)
    assert preset.schedule.learning_rate(99, 2000) == 1e-3
    assert preset.schedule.learning_rate(1999, 2000) == pytest.approx(1e-4)
    assert (preset.clip, preset.weight_decay, preset.betas) == (1.0, 0.1, (0.9, 0.99))

    assert (PRESETS["generator"]["seed"].batch, PRESETS["generator"]["seed"].steps) == (32, 170_000)


@each("preset", [preset for named in PRESETS.values() for preset in named.values()])
def test_config_round_trips_through_a_dict(preset: TrainConfig) -> None:
    assert config_from_dict(preset.to_dict()) == preset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": 5}, "accumulate must be at most batch, got 5 and 4"),
        ({"precision": "int8"}, "precision must be one of 'float32', 'bfloat16', 'float16', got"),
        ({"eps": 0.0}, "eps must be above 0 and finite, got 0.0"),
        ({"batch": -1}, "batch must be a whole number of at least 1, got -1"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1, got 0"),
        ({"clip": 0.0}, "clip must be above 0, got 0.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0 and finite, got -0.1"),
        ({"seed": -1}, "seed must be at least 0 and below 2\\*\\*63, got -1"),
        (
            {"attn_implementation": "x"},
            "attn_implementation must be one of 'eager', 'fused', 'sdpa', got 'x'",
        ),
    ],
)
def test_invalid_setting_is_named(
    config: TrainConfig, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_unavailable_device_is_named(config: TrainConfig, data: Dataset, device: str) -> None:
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used: "):
        Trainer(replace(config, device=device), data)


def test_optional_field_of_a_checkpoint_is_none_or_of_its_type() -> None:
    fields = PRESETS["transformer-xl"]["demo"].to_dict()
    model = fields["task"]["model"]
    for size in (None, 24):
        model["head_size"] = size
        assert config_from_dict(fields).task.model.head_size == size
    for value in ("24", 2.5, True):
        model["head_size"] = value
        with pytest.raises(ValueError, match=r"model\.head_size must be of type int, got"):
            config_from_dict(fields)
    model["head_size"], model["width"] = None, None
    with pytest.raises(ValueError, match=r"model\.width must be of type int, got None"):
        config_from_dict(fields)


def test_enwik8_preset_matches_its_source() -> None:
    """kimiyoung/transformer-xl, pytorch/run_enwik8_base.sh."""
    preset = PRESETS["transformer-xl"]["enwik8-base"]
    assert (preset.batch, preset.steps, preset.clip, preset.weight_decay) == (22, 400_000, 0.25, 0)
    assert preset.schedule.learning_rate(0, 400_000) == pytest.approx(2.5e-4)
    assert preset.schedule.learning_rate(399_999, 400_000) == 0
    model = preset.task.model
    assert (model.layers, model.width, model.hidden, model.size_of_a_head()) == (12, 512, 2048, 64)
    assert (model.context, model.memory, model.dropout) == (512, 512, 0.1)


def test_absent_fields_of_a_checkpoint_are_named(config: TrainConfig) -> None:
    fields = config.to_dict()
    assert config_from_dict(fields) == config
    for part in (fields, fields["schedule"], fields["task"], fields["task"]["model"]):
        for name in list(part):
            value = part.pop(name)
            with pytest.raises(ValueError, match=name):
                config_from_dict(fields)
            part[name] = value


def test_inverse_sqrt_is_the_papers_schedule() -> None:
    width, warmup = 512, 4000
    schedule = Schedule(
        decay="inverse_sqrt", peak=(width * warmup) ** -0.5, warmup=warmup, final_share=0.0
    )
    for step in (0, 1, 3998, 3999, 4000, 50_000, 99_999):
        count = step + 1
        paper = width**-0.5 * min(count**-0.5, count * warmup**-1.5)
        assert schedule.learning_rate(step, 100_000) == pytest.approx(paper, rel=1e-12)


def test_cosine_rises_to_the_peak_and_falls_to_the_final_share() -> None:
    schedule = Schedule(peak=2.0, warmup=10, final_share=0.1)
    rates = [schedule.learning_rate(step, 110) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * count for count in range(1, 11)])
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


def test_warm_up_may_be_longer_than_the_run_or_absent() -> None:
    assert Schedule(peak=1.0, warmup=100).learning_rate(9, 10) == pytest.approx(0.1)
    assert Schedule(peak=1.0, warmup=0).learning_rate(0, 1000) == pytest.approx(1.0, abs=1e-4)


@each("step", [-1, 10])
def test_step_outside_the_run_is_named(step: int) -> None:
    with pytest.raises(ValueError, match=f"step must be between 0 and 9, got {step}"):
        Schedule().learning_rate(step, 10)


@each(
    ("options", "message"),
    [
        ({"peak": 0.0}, "peak must be above 0 and finite, got 0.0"),
        ({"peak": float("nan")}, "peak must be above 0 and finite, got nan"),
        ({"final_share": 1.5}, "final_share must be between 0 and 1, got 1.5"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"warmup": 0, "decay": "inverse_sqrt"}, "warmup must be at least 1, got 0"),
        ({"decay": "linear"}, "decay must be one of 'cosine', 'inverse_sqrt', got 'linear'"),
    ],
)
def test_invalid_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**options)  # type: ignore[arg-type]


ROWS = [
    CurveRow(1, 48, 0.1, 5.123456789012345, None, None, 480.0),
    CurveRow(2, 96, 0.30000000000000004, 4.5, 4.25, 6.131387258, 240.0),
]


def test_csv_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    rewrite_curve(path, ())
    for row in ROWS:
        append_to_curve(path, row)
    assert read_curve(path) == ROWS
    header = path.read_text().splitlines()[0]
    assert header == "step,tokens,seconds,train_loss,val_loss,score,tokens_per_s"
    rewrite_curve(path, ROWS[:1])
    assert read_curve(path) == ROWS[:1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    path.symlink_to("/dev/full")
    ways: tuple[Callable[[], None], ...] = (
        lambda: append_to_curve(path, ROWS[0]),
        lambda: rewrite_curve(path, ROWS),
        lambda: plot_curves({"eager": ROWS}, path),
    )
    for write in ways:
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("text", ["", "step\n1\n", "{header}\n1,2\n", "{header}\nx,,,,,,\n", "\0"])
def test_file_that_is_not_a_curve_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text.format(header=",".join(CurveRow._fields)))
    with pytest.raises(ValueError, match=r"curve\.csv is not a curve: "):
        read_curve(path)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_format_follows_the_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"curve.{suffix}"
    plot_curves({"eager": ROWS, "fused": ROWS[1:]}, path)
    assert path.read_bytes().startswith(magic)


def test_progress_bar_shows_steps_and_validations(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2, label="fused", unit="bytes", score="bits/byte") as on_row:
        on_row(CurveRow(1, 48, 0.1, 5.0, None, None, 480.0))
        on_row(CurveRow(2, 96, 12.2, 4.5, 4.25, 6.131, 12345.0))
    out, err = capsys.readouterr()
    assert out == ""
    for figure in ("fused: step      2", "held-out loss 4.250", "6.131 bits/byte", "12 s"):
        assert figure in err
    for figure in ("2/2", "loss 4.500", "12,345 bytes/s"):
        assert figure in err


def test_missing_library_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_kernels.common.optional_deps.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed: pip install .*\[train\]"):
        plot_curves({}, tmp_path / "curve.png")
    with pytest.raises(ImportError, match=r"rich .* \[?.*\[train\]"), progress_bar(1):
        pass
