"""Published weights: safetensors files in the layout that HuggingFace's library writes.

What a model's own file adds is the names: which tensor there is which parameter here.
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

from transformer_kernels.optional_deps import require

Model = TypeVar("Model", bound=nn.Module)

HEAD_SIZE = 64
"""Of every size of GPT-2 and BERT that was published; no tensor's shape tells it."""

_PARTS = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the names in files of one kind vary."""

    prefix: str
    """What names may begin with, or not."""
    ignored: str
    """A regular expression for names, without the prefix, of what is not needed."""
    old_endings: tuple[tuple[str, str], ...] = ()
    """Each with the ending that newer files have."""

    def name(self, stored: str) -> str:
        """What a tensor would be called in a new file without the prefix."""
        name = stored.removeprefix(self.prefix)
        for old, new in self.old_endings:
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


class PublishedWeights:
    """The tensors of one open file, each to be taken once; every error is a ValueError that names
    the tensor and the file."""

    def __init__(self, file: Any, path: Path | str, layout: Layout) -> None:
        """`file` is what safetensors opened."""
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
        self._left = set(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def layers(self, prefix: str) -> int:
        """One more than the largest n of names that begin with `prefix` and "n.", and at least 1:
        what is missing of them is then named when it is taken."""
        numbers = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in self._stored)
        return 1 + max((int(number[1]) for number in numbers if number), default=0)

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that has to be a matrix, and not an empty one."""
        shape = self._shape(name)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{self._tensor(name)} must be a matrix that is not empty, got shape {shape}"
            )
        return shape[0], shape[1]

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A copy of the tensor in torch's default dtype."""
        found = self._shape(name)
        if found != tuple(shape):
            raise ValueError(f"{self._tensor(name)} must have shape {tuple(shape)}, got {found}")
        tensor: Tensor = self._file.get_tensor(self._stored[name])
        if not tensor.is_floating_point():
            raise ValueError(f"{self._tensor(name)} must be floating-point, got {tensor.dtype}")
        self._left.discard(name)
        return tensor.to(torch.get_default_dtype(), copy=True)

    def linear(self, name: str, ours: str, inputs: int, outputs: int) -> dict[str, Tensor]:
        """The weight (outputs, inputs) and the bias of a linear layer, by their names here."""
        return {
            f"{ours}.weight": self.take(f"{name}.weight", (outputs, inputs)),
            f"{ours}.bias": self.take(f"{name}.bias", (outputs,)),
        }

    def norm(self, name: str, ours: str, width: int) -> dict[str, Tensor]:
        """The weight and the bias of a normalisation, by their names here."""
        return {f"{ours}.{part}": self.take(f"{name}.{part}", (width,)) for part in _PARTS}

    def check_tied(self, name: str, tensor: Tensor) -> None:
        """That `name`, if the file has it, is the same as `tensor`, which is the parameter here."""
        if name in self and not torch.equal(self.take(name, tensor.shape), tensor):
            raise ValueError(
                f"{self._tensor(name)} must be the tensor that it is tied to, but has other values"
            )

    def check_all_taken(self) -> None:
        """ValueError for a tensor that nobody took."""
        if self._left:
            names = ", ".join(self._stored[name] for name in sorted(self._left)[:3])
            more = f" and {len(self._left) - 3} more" if len(self._left) > 3 else ""
            raise ValueError(
                f"{self._path} has tensors that the model has no use for: {names}{more}"
            )

    def heads(self, width: int, heads: int | None) -> int:
        """`heads`, or what heads of 64 give."""
        if heads is not None:
            return heads
        if width % HEAD_SIZE:
            raise ValueError(
                f"heads must be given for {self._path}: its width {width} is no multiple of "
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
    """The tensors of a safetensors file. Nothing in it is executed.

    OSError where it cannot be read, ValueError where it is no such file or is damaged, ImportError
    where safetensors is missing.
    """
    require("safetensors", extra="train")
    from safetensors import SafetensorError, safe_open

    # safetensors maps the file into memory, and its errors for what cannot be read are obscure.
    with Path(path).open("rb"):
        pass
    try:
        with safe_open(path, framework="pt") as file:
            yield PublishedWeights(file, path, layout)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or it is damaged: {error}") from error


def with_weights(build: Callable[[], Model], state: dict[str, Tensor]) -> Model:
    """The model that `build` makes, in evaluation mode, with the tensors of `state` as parameters:
    none is drawn or copied for it."""
    with torch.device("meta"):
        model = build()
    model.load_state_dict(state, assign=True)
    return model.eval()
