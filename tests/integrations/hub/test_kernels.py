"""The kernels, loaded by HuggingFace's library `kernels`."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from building.hub import KERNELS, OUT, repository
from tests.integrations.flash_attn.plain import OPTIONS
from transformer_kernels import _C
from transformer_kernels.integrations import flash_attn

FLASH_ATTN = "tk/flash-attn"


def loaded(name: str) -> Any:
    from kernels import get_kernel

    return get_kernel(name, version=0)


def test_public_functions() -> None:
    flash, attention = loaded(FLASH_ATTN), loaded("tk/attention")
    assert set(flash.__all__) == {*flash_attn.__all__, "pad_input", "unpad_input"}
    assert attention.__all__ == ["flash_attn_forward", "supports_flash_attn"]
    assert not hasattr(attention, "flash_attn_varlen_func")  # transformers would prefer it


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_are_those_of_the_package(options: dict[str, Any]) -> None:
    kernel = loaded(FLASH_ATTN)
    q = torch.randn(3, 35, 4, 24, requires_grad=True)
    k, v = (torch.randn(3, 67, 2, 24, requires_grad=True) for _ in range(2))
    do = torch.randn(3, 35, 4, 24)
    outputs = [module.flash_attn_func(q, k, v, **options) for module in (kernel, flash_attn)]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(o, (q, k, v), do) for o in outputs]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_operators_have_namespaces_of_their_own() -> None:
    x = torch.randn(1, 5, 2, 8)
    modules = {"tk": flash_attn, FLASH_ATTN: loaded(FLASH_ATTN)}
    found = {}
    for name, module in modules.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            module.flash_attn_func(x, x, x)
        (found[name],) = {e.name for e in profiler.events() if "attention_forward" in e.name}
    assert found["tk"] == "transformer_kernels::attention_forward"
    kernel_id = modules[FLASH_ATTN].__name__
    assert found[FLASH_ATTN] == f"{kernel_id}::attention_forward"


def test_compiled_training() -> None:
    kernel = loaded(FLASH_ATTN)
    x = torch.randn(2, 9, 4, 8, requires_grad=True)
    compiled: Any = torch.compile(kernel.flash_attn_func, backend="aot_eager", fullgraph=True)
    o = compiled(x, x, x, causal=True)
    expected = kernel.flash_attn_func(x, x, x, causal=True)
    torch.testing.assert_close(o, expected)
    gradients = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (o, expected))
    torch.testing.assert_close(*gradients)


ALONE = """
import sys
sys.modules["transformer_kernels"] = None  # an import raises ImportError

import torch
from kernels import get_kernel

flash = get_kernel("tk/flash-attn", version=0)
x = torch.randn(2, 9, 4, 8, requires_grad=True)
flash.flash_attn_func(x, x, x, causal=True).sum().backward()
get_kernel("tk/attention", version=0)
"""


def test_the_package_is_not_needed() -> None:
    """Both kernels in a process that cannot import it."""
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_isa() -> None:
    """The library chooses the kernels for the same CPU as the package."""
    compiled = sys.modules[f"{loaded(FLASH_ATTN).__name__}._C"]
    assert compiled.isa() == _C.isa()


VARIANTS = [next((OUT / repository(kernel) / "build").glob("*"), OUT) for kernel in KERNELS]


@pytest.mark.parametrize("variant", VARIANTS, ids=list(KERNELS))
def test_the_hub_accepts_the_library(variant: Path) -> None:
    """Its limits of symbols, and no Python at all."""
    import kernel_abi_check

    library = kernel_abi_check.ObjectFile(variant / "operators.so")
    assert library.check_manylinux("manylinux_2_28") == []
    assert library.check_python_abi("3.9") == []
    listed = subprocess.run(
        ["nm", "-D", variant / "operators.so"], check=True, capture_output=True, text=True
    )
    assert " Py" not in listed.stdout
    assert " T " not in listed.stdout


@pytest.mark.parametrize("variant", VARIANTS, ids=list(KERNELS))
def test_the_hub_accepts_the_metadata(variant: Path, tmp_path: Path) -> None:
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.version == 0
    assert metadata.provenance.kernel is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    changed = tmp_path / "variant"
    shutil.copytree(variant, changed)
    (changed / "__init__.py").write_text("changed = True\n")
    with pytest.raises(DigestValidationError, match=r"__init__\.py"):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, changed))


@pytest.mark.parametrize("kernel", KERNELS)
def test_card_and_benchmark(kernel: str) -> None:
    """The benchmark compares with torch, and the card names functions that exist."""
    import kernels

    # Not by an import: kernels.cli needs packages that check signatures.
    command = runpy.run_path(str(Path(kernels.__file__).parent / "cli/benchmark.py"))
    folder = OUT / repository(kernel)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n")
    public = loaded(f"tk/{repository(kernel)}").__all__
    assert set(re.findall(r"`(\w+)`", card.partition("Functions: ")[2].partition("\n")[0])) <= {
        *public
    }
    script = folder / "benchmarks/benchmark.py"
    (workloads,) = command["discover_benchmark_classes"](script, folder)
    results, _ = command["run_benchmark_class"](workloads, 1, 1, str(folder), True, "")
    assert len(results) == 2
    assert all(result.verified for result in results.values())
