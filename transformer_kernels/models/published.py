"""Loader of published weights: safetensors files as written by HuggingFace transformers.

The file of each model has the table of its parameters' names in such files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        """Number of layers, whose names begin with `prefix` + "n."; none may be missing."""
        matches = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in self._stored)
        numbers = {int(match[1]) for match in matches if match}
        for n in range(max(numbers, default=0) + 1):
            if n not in numbers:
                raise ValueError(f"{self._path} lacks {prefix}{n}, which the model needs")
        return len(numbers)

    def matrix(self, name: str) -> tuple[int, int]:
        """Shape of a tensor, which must be a non-empty matrix."""
        shape = self._shape(name)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{self._tensor(name)} must be a non-empty matrix, got shape {shape}")
        return shape[0], shape[1]

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

    def model(
        self,
        build: Callable[[], Model],
        names: Mapping[str, str],
        *,
        given: Mapping[str, Tensor] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> Model:
        """Builds a model with the weights of the file, in evaluation mode.

        Parameters are neither initialised nor copied: `build` runs on the meta device.

        Args:
            build: constructor of the model.
            names: names in the file by the names of the model's parameters, or of the modules that
                hold them.
            given: parameters that the file has in another form, or not at all.
            tied: parameters by the names of tensors that the file may have as well, and that must
                equal them.

        Raises:
            ValueError: a tensor is missing, unexpected, of the wrong shape or not the tied one.
        """
        with torch.device("meta"):
            model = build()
        state = dict(given or {})
        for name, parameter in model.named_parameters():
            if name not in state:
                module, _, own = name.rpartition(".")
                stored = names[name] if name in names else f"{names[module]}.{own}"
                state[name] = self.load(stored, parameter.shape)
        for stored, name in (tied or {}).items():
            if stored in self and not torch.equal(
                self.load(stored, state[name].shape), state[name]
            ):
                raise ValueError(f"{self._tensor(stored)} must equal the tensor that it is tied to")
        if self._unused:
            unused = ", ".join(self._stored[name] for name in sorted(self._unused)[:3])
            more = f" and {len(self._unused) - 3} more" if len(self._unused) > 3 else ""
            raise ValueError(f"{self._path} has unexpected tensors: {unused}{more}")
        model.load_state_dict(state, assign=True)
        return model.eval()

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise ValueError(f"{self._path} lacks {name}, which the model needs")
        return tuple(self._file.get_slice(self._stored[name]).get_shape())

    def _tensor(self, name: str) -> str:
        return f"{self._stored[name]} of {self._path}"


def names_of_layers(layers: int, names: Mapping[str, str]) -> dict[str, str]:
    """`names` for each layer, whose number replaces every "*"."""
    return {
        name.replace("*", str(n)): stored.replace("*", str(n))
        for n in range(layers)
        for name, stored in names.items()
    }


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
