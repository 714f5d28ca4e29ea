"""Writes kernels for HuggingFace's library `kernels`, for CPUs: `make hub`.

    python -m building.hub

build/hub/<kernel>/build/<variant> then has a copy of the package's sources, the operators as a
shared library, and metadata. The library has no Python: by torch's stable ABI it serves every
Python, and every torch from MINIMUM_TORCH on. Its operators have a namespace of their own, so that
the kernels and an installed package can be used in one process. Beside build/ are the card of the
repository and a benchmark (building/hub_files). The requirements are those of the hub for
kernels: docs/quickstarts/sentence-transformers.md.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from building.extension import EXPORTS, LINK_FLAGS, OBJECTS, ROOT
from building.host import COMMON_FLAGS, isas_for, operator_units
from building.ninja import Toolchain, ninja_file, run_ninja
from building.tools import MINIMUM_TORCH, find_compiler, find_torch

KERNELS = {
    "attention": (
        "Attention for models of transformers, by the name of this repository.",
        ("flash_attn_forward",),
    ),
    "flash_attn": (
        "The functions of flash_attn 2.8, with its signatures, for batches without padding.",
        ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "pad_input"),
    ),
    "linear_layers": (
        "The gated delta rule, KDA and their convolution, for hybrid models of transformers.",
        ("layers",),
    ),
}
"""Modules of transformer_kernels/integrations/hub, what they are for, and their main functions."""
VERSION = 0
"""Version of these functions' interface, which users of the hub select; 0 is a beta."""
FILES = ROOT / "building/hub_files"
RELEASE: str = runpy.run_path(str(ROOT / "transformer_kernels/version.py"))["__version__"]
PACKAGE = ROOT / "transformer_kernels"
PARTS = (
    *("version.py", "common", "masks", "scores", "problem", "backends", "dispatch"),
    *("functional", "linear"),
    *("integrations/__init__.py", "integrations/flash_attn", "integrations/huggingface"),
    *("integrations/hub", "integrations/paged_varlen.py"),
)
"""Modules and folders of the package that the functions need."""
OUT = ROOT / "build/hub"

_INIT = '''"""Attention of transformer_kernels, for HuggingFace's library `kernels`."""

from .integrations.hub.{kernel} import *
from .integrations.hub.{kernel} import __all__
'''
_COMPILED = '''"""What the package asks of its compiled extension."""

from pathlib import Path

import torch

from .common.namespace import NAMESPACE

torch.ops.load_library(Path(__file__).with_name("operators.so"))

CUDA_WIDTHS = CUDA_LINEAR_WIDTHS = LARGE_SHARED_CHIPS = ()


def isa():
    return getattr(torch.ops, NAMESPACE).isa()


def build_info():
    return {information!r}
'''


def repository(kernel: str) -> str:
    """Name of a kernel's repository, and of its folder."""
    return kernel.replace("_", "-")


def local_kernels(out: Path = OUT) -> str:
    """Value of the environment variable LOCAL_KERNELS, by which `kernels` loads tk/<kernel> from
    the folder that it was written to."""
    return ":".join(f"tk/{repository(kernel)}={out / repository(kernel)}" for kernel in KERNELS)


def variant(machine: str, system: str) -> str:
    """Name of the folder: what the library needs."""
    major, minor = MINIMUM_TORCH
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return f"torch-stable-abi{major}{minor}-cpu-{machine}-{system.lower()}"


def sources() -> Iterator[PurePosixPath]:
    """The files of the package that are copied, relative to it."""
    for part in PARTS:
        path = PACKAGE / part
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        yield from (PurePosixPath(file.relative_to(PACKAGE)) for file in files)


def identifier(kernel: str, texts: dict[str, str]) -> str:
    """A name that differs between kernels and versions of the sources: that of the module in
    `sys.modules`, and the namespace of its operators."""
    digest = hashlib.sha256(kernel.encode())
    csrc = {str(path): path.read_text() for path in sorted((ROOT / "csrc").rglob("*.*"))}
    for name, text in (texts | csrc).items():
        digest.update(f"{name}\0{text}\0".encode())
    return f"_transformer_kernels_{kernel}_cpu_{digest.hexdigest()[:12]}"


def metadata(kernel: str, name: str, target: Path) -> dict[str, object]:
    """What `kernels` reads. The digest covers the files of `target`, which metadata.json joins."""
    files = sorted(path for path in target.rglob("*") if path.is_file())
    return {
        "id": name,
        "name": f"transformer-kernels-{repository(kernel)}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {
            "algorithm": "sha256",
            "files": {
                path.relative_to(target).as_posix(): base64.b64encode(
                    hashlib.sha256(path.read_bytes()).digest()
                ).decode()
                for path in files
            },
        },
        **provenance(),
    }


def provenance() -> dict[str, object]:
    """The commit of the sources; empty outside a git repository."""
    if not (ROOT / ".git").exists():
        return {}
    commit, status = (
        subprocess.check_output(("git", "-C", str(ROOT), *command), text=True)
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
    )
    builder = {"version": f"transformer_kernels {RELEASE}"}  # not the hub's kernel-builder
    source = {"commit": commit.strip(), "dirty": bool(status)}
    return {"provenance": {"kernel-builder": builder, "kernel": source}}


def card(kernel: str) -> str:
    """The README.md of a kernel's repository."""
    about, functions = KERNELS[kernel]
    return (
        (FILES / "card.md")
        .read_text(encoding="utf-8")
        .format(
            name=f"transformer-kernels-{repository(kernel)}",
            about=about,
            repository=f"<publisher>/{repository(kernel)}",
            version=VERSION,
            functions=", ".join(f"`{function}`" for function in functions),
            torch=".".join(map(str, MINIMUM_TORCH)),
            release=RELEASE,
        )
    )


def compile_library(kernel: str, namespace: str) -> Path:
    """Compiles the operators of a kernel. Raises CompileError on failure."""
    torch, output = find_torch(), f"{OBJECTS}/{kernel}.so"
    units = operator_units(platform.machine(), torch, (f"-DTK_LIBRARY={namespace}",), kernel)
    link_flags = (f"-L{torch.root / 'lib'}", *LINK_FLAGS, *EXPORTS)
    tools = Toolchain(find_compiler(os.environ), COMMON_FLAGS, link_flags)
    run_ninja(ROOT, OBJECTS, ninja_file(units, tools, OBJECTS, output))
    return ROOT / output


def write(kernel: str, out: Path) -> Path:
    """Writes the repository of a kernel into `out`; returns the folder of its variant."""
    texts = {str(file): (PACKAGE / file).read_text(encoding="utf-8") for file in sources()}
    name = identifier(kernel, texts)
    library = compile_library(kernel, name)
    isas = [isa.name for isa in isas_for(platform.machine())]
    information = {"isas": isas, "cuda": "", "cuda_architectures": []}
    target = out / "build" / variant(platform.machine(), platform.system())
    shutil.rmtree(target, ignore_errors=True)
    texts |= {
        "__init__.py": _INIT.format(kernel=kernel),
        "_C.py": _COMPILED.format(information=information),
        "common/namespace.py": f'"""The namespace of the operators."""\n\nNAMESPACE = "{name}"\n',
    }
    for file, text in texts.items():
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(library, target / "operators.so")
    text = json.dumps(metadata(kernel, name, target), indent=2)
    (target / "metadata.json").write_text(f"{text}\n", encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    (out / "README.md").write_text(card(kernel), encoding="utf-8")
    (out / "benchmarks").mkdir(exist_ok=True)
    benchmark = "benchmark_layers.py" if kernel == "linear_layers" else "benchmark.py"
    shutil.copy(FILES / benchmark, out / "benchmarks/benchmark.py")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m building.hub")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    for kernel in KERNELS:
        print(write(kernel, out / repository(kernel)))


if __name__ == "__main__":
    main()
