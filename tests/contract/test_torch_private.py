"""Torch releases that lack a private symbol: features are disabled and reported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from building.extension import ROOT
from transformer_kernels.common import torch_private
from transformer_kernels.dispatch.autograd import FusedAttention

PROGRAM = """
import sys
import types
from pathlib import Path

# Simulates a torch release that renames the symbol.
module = types.ModuleType("transformer_kernels.common.torch_private")
source = Path("transformer_kernels/common/torch_private.py").read_text()
assert source.count(sys.argv[1]) >= 1
exec(source.replace(sys.argv[1], sys.argv[1] + "_renamed"), vars(module))
sys.modules[module.__name__] = module

import torch
import transformer_kernels as tk
q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
o = tk.attention(q, k, v, mask=tk.Mask.causal())
exact = tk.attention(q, k, v, mask=tk.Mask.causal(), backend="reference")
torch.testing.assert_close(o, exact)
for ours, reference in zip(
    torch.autograd.grad(o.sum(), (q, k, v)), torch.autograd.grad(exact.sum(), (q, k, v))
):
    torch.testing.assert_close(ours, reference)
print(tk.info().fast_path)
print(*tk.info().missing)
try:
    tk.enable()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "path",
    [
        torch_private._FAST_PATH[0],
        *(
            pytest.param(path, marks=pytest.mark.exhaustive)
            for path in torch_private._FAST_PATH[1:]
        ),
    ],
)
def test_missing_fast_path_symbol_disables_the_fast_path(path: str) -> None:
    fast_path, missing, *_ = run(path)
    assert fast_path.endswith(f"lacks torch.{path}_renamed")
    assert f"torch.{path}_renamed" in missing
    assert " in torch " in missing


def test_missing_sdpa_symbol_disables_enable() -> None:
    fast_path, missing, refusal = run("library.Library._destroy")
    assert fast_path == "None"
    assert "torch.library.Library._destroy_renamed" in missing
    assert refusal.startswith("enable() needs torch.library.Library._destroy_renamed, which torch ")


@pytest.mark.parametrize("path", [torch_private._JAGGED[0], torch_private._VARLEN[0]])
def test_a_missing_symbol_of_one_kind_of_call_leaves_the_others(path: str) -> None:
    fast_path, missing = run(path)  # enable() raises nothing
    assert fast_path == "None"
    assert f"torch.{path}_renamed" in missing


def test_missing_symbols_of_transforms_skip_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch handles transforms in Python, or since 2.15 in C++, where nothing can be skipped."""
    in_python = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
    assert (torch_private.apply_of(FusedAttention) != FusedAttention.apply) == in_python
    assert not torch_private.forward_ad_is_active()
    monkeypatch.setattr(torch_private, "_functorch_is_active", torch_private._MISSING)
    monkeypatch.delattr(forward_ad, "_current_level")
    assert torch_private.apply_of(FusedAttention) == FusedAttention.apply
    assert torch_private.forward_ad_is_active()


def test_installed_torch_has_all_symbols() -> None:
    """Torch 2.11 has no varlen attention that CPUs could take over."""
    in_2_11 = ("torch.ops.aten._flash_attention_forward_no_dropout_inplace.default",)
    assert (in_2_11 if torch.__version__.startswith("2.11.") else ()) == torch_private.MISSING


def run(path: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
