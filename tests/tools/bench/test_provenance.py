from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from transformer_kernels.bench.provenance import ROWS, Provenance, commit_of, device_slug, slug_of


@pytest.mark.parametrize(
    ("model", "flags", "machine", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C", "avx2 avx512f amx_bf16", "x86_64", "xeon-amx"),
        ("AMD EPYC 7B13", "sse2 avx2", "x86_64", "epyc-avx2"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "avx2 avx512f", "x86_64", "ryzen-avx512"),
        ("Common KVM processor", "sse2", "x86_64", "x86-64"),
        ("", "", "aarch64", "aarch64"),
    ],
)
def test_a_slug_has_the_family_and_the_widest_instructions(
    model: str, flags: str, machine: str, slug: str
) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu {flags}\n"
    assert slug_of(cpuinfo, machine) == slug


def test_the_slug_of_a_gpu_is_its_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "AMD Instinct MI300X (rev. 1)"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    device, now = torch.device("cuda"), Provenance.now()
    assert device_slug(device) == "amd-instinct-mi300x-rev-1"
    assert now.on(device) == replace(now, device="amd-instinct-mi300x-rev-1")
    assert now.on(torch.device("cpu")) == now


def test_changed_files_mark_a_commit_but_recorded_rows_do_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    source, rows = tmp_path / "source.py", tmp_path / ROWS / "device" / "cpu.csv"
    rows.parent.mkdir(parents=True)
    source.touch()
    rows.touch()
    assert commit_of(tmp_path) == ""
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    rows.write_text("a row")
    assert commit_of(tmp_path) == commit
    source.write_text("a change")
    assert commit_of(tmp_path) == commit + "+"


def test_now_describes_this_process() -> None:
    now = Provenance.now()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", now.date)
    assert now.threads == torch.get_num_threads()
    assert now.torch == torch.__version__
    assert re.fullmatch(r"[a-z0-9-]+", now.device)
