"""Calls with one argument made wrong: they raise a ValueError or TypeError that names an argument,
or return a result that fits the arguments."""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

import transformer_kernels
from tests.fuzz.calls import Call
from tests.fuzz.hostile.arguments import FUNCTIONS, OPERATORS, SCALAR_ARGUMENTS, VARIANTS, Arguments
from tests.fuzz.hostile.values import NEVER_VALID, VALUES
from transformer_kernels.integrations.torch_sdpa import ArgumentTypeError, ArgumentValueError

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
PACKAGE = Path(transformer_kernels.__file__).parent
DROP_IN = "scaled_dot_product_attention"
OUT_OF_MEMORY = re.compile("(can't|cannot) allocate memory|out of memory", re.IGNORECASE)
OF_TORCH = ("tensor: fake", "tensor: batched")
"""Tensors of torch's tracers, which torch itself refuses among plain ones, with its own errors."""
ALSO_NAMED = (
    "backend", "mask", "bias", "relative", "slopes", "table", "keys", "cache", "page_size",
)  # fmt: skip
"""Names in messages beside those of arguments: parts of a mask, a bias or a cache."""
ALLOCATING = (
    "Mask.materialize", "Mask.show", "alibi_slopes",
    "block_patterns.local", "block_patterns.strided", "block_patterns.fixed",
)  # fmt: skip
"""Functions that allocate as much memory as their arguments ask for."""
TOO_MUCH_MEMORY = ("2**31 - 1", "2**31")
"""Values that ask for gigabytes. Larger ones ask for more than any machine has."""
FREED = ("tensor: freed", "tensor: freed view")
"""Values that crash torch where an operator expects a number: its error prints them."""
READ_INDICES = ("operator forward, packed", "operator forward, cache")
"""Operators that trust the values of cu_seqlens, cache_seqlens and block_table on a GPU."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Hostile(Call):
    """A call of `function` with a valid argument replaced by a value of VALUES, or by another
    argument's value ("argument NAME")."""

    function: str
    argument: str
    value: str
    backend: str = "auto"
    variant: int = 0
    """Index in VARIANTS, the valid calls."""
    mode: str = "grad"
    """Key of MODES."""

    def check(self) -> None:
        function = FUNCTIONS[self.function]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its prototypes
            every, given = function.given(VARIANTS[self.variant], self.backend)
            given[self.argument] = self._value(every)
            with MODES[self.mode]():
                try:
                    result = function.call(**given)
                    _run_backward(result)
                except Exception as error:  # noqa: BLE001 - its class is what is checked
                    self._check_error(error, every)
                else:
                    self._check_result(result, given)

    def _value(self, every: Arguments) -> object:
        kind, _, name = self.value.partition("argument ")
        if not kind:
            return every[name]
        valid = every[self.argument]
        return VALUES[self.value](valid.detach() if isinstance(valid, Tensor) else torch.ones(3))

    def _check_error(self, error: Exception, every: Arguments) -> None:
        if isinstance(error, RuntimeError | MemoryError) and OUT_OF_MEMORY.search(str(error)):
            return
        if self.value in OF_TORCH:
            return
        line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        assert type(error) in self._allowed(), f"raised {line}"
        if is_operator(self.function):
            return
        assert str(error), f"raised {line} without a message"
        file = _raised_in(error.__cause__ or error if self.function == DROP_IN else error)
        assert file.is_relative_to(PACKAGE), f"raised {line} in {file}"
        names = (*every, "leading") if self.function == DROP_IN else (*every, *ALSO_NAMED)
        assert any(re.search(rf"\b{name}\b", str(error)) for name in names), (
            f"raised {line}, which names no argument"
        )

    def _allowed(self) -> tuple[type[Exception], ...]:
        if is_operator(self.function):
            return RuntimeError, NotImplementedError, ValueError, TypeError, IndexError
        if self.function == DROP_IN:
            return ArgumentValueError, ArgumentTypeError
        return ValueError, TypeError

    def _check_result(self, result: object, given: Arguments) -> None:
        if is_operator(self.function):
            return
        assert self.value not in NEVER_VALID, "raised nothing"
        o = result[0] if isinstance(result, tuple) else result
        q = given.get("q", given.get("query", given.get("_attention", {}).get("q")))
        if isinstance(o, Tensor) and q is not None:
            has_dtype = o.dtype == q.dtype or self.mode == "autocast"
            assert has_dtype, f"returned {o.dtype} for {q.dtype}"
            # Leading dimensions of `query` broadcast.
            has_shape = o.shape[:-1] == q.shape[:-1] or "query" in given
            assert has_shape, f"returned {tuple(o.shape)} for {tuple(q.shape)}"


def _raised_in(error: BaseException) -> Path:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename)


def _run_backward(result: object) -> None:
    results = result if isinstance(result, tuple) else (result,)
    if outputs := [x for x in results if isinstance(x, Tensor) and x.requires_grad]:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])


def is_operator(function: str) -> bool:
    """True for dispatcher operators. They promise memory safety and torch's classes of errors."""
    return function in OPERATORS


@functools.cache
def arguments_of(function: str) -> tuple[str, ...]:
    every, _ = FUNCTIONS[function].given(VARIANTS[0], "cpu")
    return tuple(name for name in every if not name.startswith("_"))


def values_of(function: str, argument: str) -> list[str]:
    """Returns the names of the values to try, simplest first."""
    others = [name for name in arguments_of(function) if name != argument]
    left_out = TOO_MUCH_MEMORY if function in ALLOCATING else ()
    if argument in SCALAR_ARGUMENTS and is_operator(function):
        left_out = FREED
    return [name for name in VALUES if name not in left_out] + [f"argument {n}" for n in others]


def backends_of(function: str, backends: Sequence[str]) -> list[str]:
    """Returns the backends to call, of those wanted. Triton's operators do not check shapes."""
    if not is_operator(function):
        return list(backends)
    safe = ("cpu",) if function in READ_INDICES else ("cpu", "cuda")
    return [name for name in backends if name in safe] or ["cpu"]


@st.composite
def hostile_calls(draw: st.DrawFn, backends: Sequence[str]) -> Hostile:
    """Draws calls of all functions. `backends` are the backends to call, simplest first."""
    function = draw(st.sampled_from(list(FUNCTIONS)))
    argument = draw(st.sampled_from(arguments_of(function)))
    return Hostile(
        function=function,
        argument=argument,
        value=draw(st.sampled_from(values_of(function, argument))),
        backend=draw(st.sampled_from(backends_of(function, backends))),
        variant=draw(st.integers(0, len(VARIANTS) - 1)),
        mode=draw(st.sampled_from(list(MODES))),
    )
