"""Loader of published weights: safetensors files as written by HuggingFace transformers.

The mapping from tensor names to parameters is in the file of each model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..common.optional_deps import require

Model = TypeVar("Model", bound=nn.Module)

HEAD_SIZE = 64
"""Head size of every published GPT-2 and BERT; it cannot be inferred from tensor shapes."""

_PARTS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Variations of tensor names between the files of one architecture."""

    prefix: str
    """Optional prefix of all names."""
    ignored: str
    """Regular expression for the names, without the prefix, of tensors to ignore."""
    old_endings: tuple[tuple[str, str], ...] = ()
    """Pairs of an old name suffix and its current form."""

    def name(self, stored: str) -> str:
        """Canonical name: without the prefix and with the current suffix."""
        name = stored.removeprefix(self.prefix)
        for old, new in self.old_endings:
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


class PublishedWeights:
    """Tensors of an open safetensors file, by canonical name.

    Tracks which tensors have been loaded. Errors are ValueErrors that name the tensor and the file.
    """

    def __init__(self, file: Any, path: Path | str, layout: Layout) -> None:
        """`file` is an open handle of `safetensors.safe_open`."""
        self._file = file
        self._path = path
        self._stored: dict[str, str] = {}
        names: list[str] = file.keys()
        for stored in names:
            name = layout.name(stored)
            if re.fullmatch(layout.ignored, name):
                continue
            if name in self._stored:
                raise ValueError(f"{path} has {name} twice, as {self._stored[name]} and {stored}")
            self._stored[name] = stored
        self._unused = set(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def layers(self, prefix: str) -> int:
        """Number of layers: one more than the largest n in names that begin with `prefix` + "n.".

        At least 1, so that loading reports the first missing tensor by name.
        """
        numbers = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in self._stored)
        return 1 + max((int(number[1]) for number in numbers if number), default=0)

    def matrix(self, name: str) -> tuple[int, int]:
        """Shape of a tensor, which must be a non-empty matrix."""
        shape = self._shape(name)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{self._tensor(name)} must be a non-empty matrix, got shape {shape}")
        return shape[0], shape[1]

    def load(self, name: str, shape: Sequence[int]) -> Tensor:
        """Loads a copy of a tensor, in torch's default dtype; its shape must be `shape`."""
        found = self._shape(name)
        if found != tuple(shape):
            raise ValueError(f"{self._tensor(name)} must have shape {tuple(shape)}, got {found}")
        tensor: Tensor = self._file.get_tensor(self._stored[name])
        if not tensor.is_floating_point():
            raise ValueError(f"{self._tensor(name)} must be floating-point, got {tensor.dtype}")
        self._unused.discard(name)
        return tensor.to(torch.get_default_dtype(), copy=True)

    def linear(self, name: str, parameter: str, inputs: int, outputs: int) -> dict[str, Tensor]:
        """Weight (outputs, inputs) and bias of a linear layer, keyed by parameter name."""
        return {
            f"{parameter}.weight": self.load(f"{name}.weight", (outputs, inputs)),
            f"{parameter}.bias": self.load(f"{name}.bias", (outputs,)),
        }

    def norm(self, name: str, parameter: str, width: int) -> dict[str, Tensor]:
        """Weight and bias of a layer normalisation, keyed by parameter name."""
        return {f"{parameter}.{part}": self.load(f"{name}.{part}", (width,)) for part in _PARTS}

    def check_tied(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError if the file has tensor `name` and it differs from `tensor`."""
        if name in self and not torch.equal(self.load(name, tensor.shape), tensor):
            raise ValueError(f"{self._tensor(name)} must equal the tensor that it is tied to")

    def check_all_used(self) -> None:
        """Raises ValueError if the file has tensors that have not been loaded."""
        if self._unused:
            names = ", ".join(self._stored[name] for name in sorted(self._unused)[:3])
            more = f" and {len(self._unused) - 3} more" if len(self._unused) > 3 else ""
            raise ValueError(f"{self._path} has unexpected tensors: {names}{more}")

    def heads(self, width: int, heads: int | None) -> int:
        """`heads`, or width / 64 if None."""
        if heads is not None:
            return heads
        if width % HEAD_SIZE:
            raise ValueError(
                f"heads must be given for {self._path}: its width {width} is not a multiple of "
                f"{HEAD_SIZE}, the size of a head in published models"
            )
        return width // HEAD_SIZE

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise ValueError(f"{self._path} lacks {name}, which the model needs")
        return tuple(self._file.get_slice(self._stored[name]).get_shape())

    def _tensor(self, name: str) -> str:
        return f"{self._stored[name]} of {self._path}"


@contextmanager
def open_weights(path: Path | str, layout: Layout) -> Iterator[PublishedWeights]:
    """Opens a safetensors file, without executing any code in it.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file, or it is damaged.
    """
    require("safetensors", extra="train")
    from safetensors import SafetensorError, safe_open

    # safetensors raises obscure errors for unreadable files; open() raises clear ones.
    with Path(path).open("rb"):
        pass
    try:
        with safe_open(path, framework="pt") as file:
            yield PublishedWeights(file, path, layout)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is damaged: {error}") from error


def with_weights(build: Callable[[], Model], state: dict[str, Tensor]) -> Model:
    """Builds a model with the tensors of `state` as parameters, in evaluation mode.

    Parameters are neither initialised nor copied: `build` runs on the meta device.
    """
    with torch.device("meta"):
        model = build()
    model.load_state_dict(state, assign=True)
    return model.eval()
