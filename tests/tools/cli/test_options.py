"""Tests of the options that are made from the fields of configs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pytest

from transformer_kernels import cli
from transformer_kernels.cli import train
from transformer_kernels.cli.options import add_options, given_options, with_options
from transformer_kernels.nn import AttnImplementation
from transformer_kernels.training import PRESETS, TrainConfig


@dataclass(frozen=True)
class Inner:
    size: int | None = None
    """Size in 10% of a
    byte."""
    peak: float = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["thin", "wide"] = "thin"
    """Form"""
    betas: tuple[float, float] = (0.9, 0.99)
    on: bool = True
    name: str = "cpu"
    hidden: int = 3


OUTER = Outer(Inner())


def parsed(words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser, OUTER, without=frozenset({"hidden"}))
    return given_options(parser.parse_args(words.split()), OUTER)


def test_only_given_options_are_parsed_with_the_types_of_their_fields() -> None:
    assert parsed("") == {}
    words = "--size 4 --lr 2 --kind wide --betas 0.5 0.25 --no-on --name cuda"
    assert with_options(OUTER, parsed(words)) == Outer(
        Inner(4, 2.0), "wide", (0.5, 0.25), on=False, name="cuda", hidden=3
    )
    assert with_options(OUTER, parsed("--peak 3")) == replace(OUTER, inner=Inner(peak=3.0))


@pytest.mark.parametrize("words", ["--kind big", "--size 1.5", "--betas 1", "--hidden 4"])
def test_value_of_another_type_is_refused(words: str) -> None:
    with pytest.raises(SystemExit):
        parsed(words)


def test_help_is_the_docstring_of_the_field_and_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, OUTER)
    text = " ".join(parser.format_help().split())
    assert "--size N Size in 10% of a byte (default: None)" in text
    assert "--kind {thin,wide} Form (default: thin)" in text
    assert "--betas N N (default: 0.9 0.99)" in text
    assert "--lr N, --peak N (default: 0.5)" in text


def config(kind: str, words: str) -> TrainConfig:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    train.add_parser(subparsers)
    train.add_models(subparsers.choices["train"])
    return train.configured(parser.parse_args(["train", kind, *words.split()]))


@pytest.mark.parametrize("kind", PRESETS)
def test_options_of_every_model_override_its_preset(kind: str) -> None:
    for name, preset in PRESETS[kind].items():
        assert config(kind, f"--preset {name}") == preset
    assert config(kind, "") == next(iter(PRESETS[kind].values()))
    changed = config(kind, "--width 240 --batch 4 --accumulate 2 --precision bfloat16 --recompute")
    assert changed.task.model.width == 240
    assert (changed.batch, changed.accumulate) == (4, 2)
    assert (changed.precision, changed.recompute) == ("bfloat16", True)


def test_fewer_steps_shorten_the_warmup_unless_it_is_given() -> None:
    demo = PRESETS["generator"]["demo"]
    words = "--preset demo --layers 3 --dropout 0.1 --batch 7 --lr 0.5 --steps 100"
    assert config("generator", words) == replace(
        demo,
        task=replace(demo.task, model=replace(demo.task.model, layers=3, dropout=0.1)),
        batch=7,
        steps=100,
        schedule=replace(demo.schedule, peak=0.5, warmup=10),
    )
    assert config("generator", f"{words} --warmup 25").schedule.warmup == 25
    assert config("translator", "--smoothing 0.3").task.smoothing == 0.3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("classifier", "classes"),
        ("lookup", "rows"),
        ("lookup", "vocabulary"),
        ("sparse", "vocabulary"),
        ("bert", "segments"),
    ],
)
def test_sizes_that_the_data_determines_are_no_options(
    kind: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", kind, "--help"])
    text = capsys.readouterr().out
    assert f"--{hidden}" not in text
    assert "--width N" in text
    assert f"--preset {{{','.join(PRESETS[kind])}}}" in text
    assert f"--attn-implementation {{{','.join(get_args(AttnImplementation))}}}" in text
