from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench.example import row
from transformer_kernels.bench import Direction, Row
from transformer_kernels.bench.pictures import plot_by_length, plot_by_visible

DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")


def rows() -> list[Row]:
    return [
        replace(row(), N=length, variant=variant, direction=direction, visible=length / 512)
        for length in (128, 256)
        for variant in ("naive", "sdpa", "cpu")
        for direction in DIRECTIONS
    ]


@pytest.mark.parametrize("draw", [plot_by_length, plot_by_visible])
def test_a_figure_names_its_variants_and_directions(draw: object, tmp_path: Path) -> None:
    assert callable(draw)
    draw(rows(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("naive bmm", "torch SDPA", "fused (cpu)", ">forward<", "forward + backward"):
        assert words in text


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_by_length(rows(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_rows_without_memory_are_drawn_too(tmp_path: Path) -> None:
    plot_by_length([replace(r, peak_mib=None) for r in rows()], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
