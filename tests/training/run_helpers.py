"""Settings and curves of small runs, and edits of checkpoints whose checksums are right."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from transformer_kernels.training import CurveRow, TrainConfig

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_dropout(config: TrainConfig, share: float) -> TrainConfig:
    model = replace(config.task.model, dropout=share)
    return replace(config, task=replace(config.task, model=model))


def without_times(rows: list[CurveRow]) -> list[CurveRow]:
    return [row._replace(seconds=0.0, tokens_per_s=0.0) for row in rows]


def put(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file, and its checksum in the list of files."""
    (folder / name).write_bytes(content)
    checksums = json.loads((folder / "checksums.json").read_text())
    checksums[name] = zlib.crc32(content)
    (folder / "checksums.json").write_text(json.dumps(checksums))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    put(folder, "config.json", json.dumps(values).encode())


def edit_tensors(
    folder: Path,
    changes: Mapping[str, Tensor | None],
    offsets: Mapping[str, Any] | None = None,
    name: str = SHARD,
) -> None:
    """Replaces tensors of a file, removes those that are None, and moves those with offsets."""
    with safe_open(folder / name, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    tensors = {key: x for key, x in (tensors | dict(changes)).items() if x is not None}
    for key, x in tensors.items():
        places.setdefault(key, {"saved_offsets": [0] * x.dim()})
    places |= {key: {"saved_offsets": at} for key, at in (offsets or {}).items()}
    put(folder, name, save(tensors, {"DCP_SHARDING_INFO": json.dumps(places)}))
