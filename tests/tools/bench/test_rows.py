"""Cases, the rows of their measurements, and pictures of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.bench.example import CASE, row
from transformer_kernels.bench import Case, Direction, Row
from transformer_kernels.bench.pictures import plot_by_length, plot_by_visible
from transformer_kernels.bench.rows import COLUMNS, append_rows, read_rows, write_rows
from transformer_kernels.masks.mask import Mask

GROUPED = Case(name="causal", B=2, H_q=4, H_kv=2, M=6, N=8, D=3, D_v=5, mask=Mask.causal())


def test_visible_is_the_fraction_of_visible_pairs() -> None:
    assert GROUPED.visible == (1 + 2 + 3 + 4 + 5 + 6) / (6 * 8)
    lengths = Mask.padding(torch.tensor([1, 4]))
    assert Case(name="padding", B=2, M=4, N=4, mask=lengths).visible == 5 / 8
    assert Case(name="full", M=4, N=4).visible == 1.0


def test_a_case_moves_with_all_its_tensors() -> None:
    bias = torch.zeros(2, 4, 6, 8, requires_grad=True)
    case = replace(GROUPED, mask=Mask.padding(torch.tensor([1, 4])), bias=bias)
    meta = case.to(torch.device("meta"))
    assert meta.mask is not None
    assert {x.device.type for _, x in meta.mask.tensors()} == {"meta"}
    assert [(x.device.type, x.requires_grad) for x in meta.learned] == [("meta", True)]
    assert replace(meta, mask=case.mask, bias=bias, device=case.device) == case
    assert [x.shape for x in GROUPED.to(torch.device("cpu")).inputs()] == [
        x.shape for x in GROUPED.inputs()
    ]


@pytest.mark.parametrize(
    ("direction", "widths"), [("fwd", 8), ("bwd", 3 * 3 + 2 * 5), ("fwd+bwd", 8 + 19)]
)
def test_operations_count_visible_pairs_only(direction: Direction, widths: int) -> None:
    pairs = 2 * 4 * 21
    assert GROUPED.operations(direction) == pytest.approx(2 * pairs * widths)


def test_traffic_counts_every_tensor_once() -> None:
    q, k, v, do = (x.numel() * 4 for x in GROUPED.inputs())
    assert GROUPED.traffic("fwd") == q + k + v + do
    assert GROUPED.traffic("bwd") == 2 * (q + k + v + do)
    assert GROUPED.traffic("fwd+bwd") == 3 * (q + k + v + do)


def test_inputs_are_normal_and_have_the_dtype_and_shapes_of_the_case() -> None:
    case = Case(name="full", H_q=4, H_kv=2, M=64, N=128, D=16, D_v=24, dtype=torch.bfloat16)
    q, k, v, do = case.inputs()
    assert (q.shape, k.shape) == ((1, 4, 64, 16), (1, 2, 128, 16))
    assert (v.shape, do.shape) == ((1, 2, 128, 24), (1, 4, 64, 24))
    for x in (q, k, v, do):
        assert x.dtype == torch.bfloat16
        assert 0.9 < float(x.double().std()) < 1.1
    assert not torch.equal(q[:, :2], k[:, :, :64])
    assert torch.equal(q, case.inputs().q)


def test_the_columns_are_fixed() -> None:
    assert COLUMNS == (
        "date", "commit", "device", "torch", "triton", "cuda", "threads", "suite", "case", "dtype",
        "B", "H_q", "H_kv", "M", "N", "D", "D_v", "mask", "visible", "dropout_p", "direction",
        "variant", "median_ms", "p20_ms", "p80_ms", "tflops", "gbytes_s", "peak_mib", "error",
        "slower",
    )  # fmt: skip


def test_rates_come_from_the_median() -> None:
    made = row()
    assert made.tflops == pytest.approx(CASE.operations("fwd") / 2e-3 / 1e12)
    assert made.gbytes_s == pytest.approx(CASE.traffic("fwd") / 2e-3 / 1e9)
    assert made.peak_mib == 3.0
    assert made.visible == 10 / 16
    assert row(case=replace(CASE, dropout_p=0.25)).dropout_p == 0.25


def test_rows_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first, second = row(), row(peak_bytes=None)
    write_rows(path, [first])
    append_rows(path, [second])
    found = read_rows(path)
    assert [(r.peak_mib, r.B, r.dtype, r.median_ms) for r in found] == [
        (3.0, 1, "float16", 2.0),
        (None, 1, "float16", 2.0),
    ]
    assert found[0] == replace(first, tflops=found[0].tflops, gbytes_s=found[0].gbytes_s)


def test_figures_without_a_meaning_survive_a_round_trip(tmp_path: Path) -> None:
    step = replace(row(), direction="step", tflops=math.nan, gbytes_s=math.nan, visible=math.nan)
    write_rows(tmp_path / "rows.csv", [step])
    (found,) = read_rows(tmp_path / "rows.csv")
    assert found.direction == "step"
    assert all(map(math.isnan, (found.tflops, found.gbytes_s, found.visible)))


def test_append_creates_the_file_and_write_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    append_rows(path, [row(), row()])
    assert len(read_rows(path)) == 2
    write_rows(path, [row()])
    assert len(read_rows(path)) == 1


def test_a_file_with_other_columns_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected the columns of Row, got a, b"):
        append_rows(path, [row()])
    assert path.read_text() == "a,b\n1,2\n"


DIRECTIONS: tuple[Direction, ...] = ("fwd", "fwd+bwd")


def drawn() -> list[Row]:
    return [
        replace(row(), N=length, variant=variant, direction=direction, visible=length / 512)
        for length in (128, 256)
        for variant in ("naive", "sdpa", "cpu")
        for direction in DIRECTIONS
    ]


@pytest.mark.parametrize("draw", [plot_by_length, plot_by_visible])
def test_a_figure_names_its_variants_and_directions(draw: object, tmp_path: Path) -> None:
    assert callable(draw)
    draw(drawn(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("naive bmm", "torch SDPA", "fused (cpu)", ">forward<", "forward + backward"):
        assert words in text


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_by_length(drawn(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_rows_without_memory_are_drawn_too(tmp_path: Path) -> None:
    plot_by_length([replace(r, peak_mib=None) for r in drawn()], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
