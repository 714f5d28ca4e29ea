"""A family of operators: a forward pass, a backward pass, and steps that overwrite a state.

Named tuples declare the arguments, see `problem.fields`. The schemas of the operators, the packing
of their arguments and the fake implementations that torch.compile and torch.export run derive from
them, for the compiled operators and those of Triton. C++ declares the same schemas, those of linear
attention by the table of csrc/common/linear_fields.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from ..backends.schema import empty_like_layout
from ..problem import Shape
from ..problem.fields import Field, schema_of, split, table


class Nothing(NamedTuple):
    """`Saved` of a family whose backward pass takes no result of the forward pass."""


class BackwardCall(NamedTuple):
    """Arguments of a backward pass."""

    cotangents: Any
    saved: Any
    x: Any
    options: Any
    flags: tuple[bool, ...] = ()
    """For each input of `Family.flagged` True if its gradient is wanted."""


@dataclass(frozen=True, eq=False)
class FamilyProblem:
    """One validated call."""

    shape: Shape
    """B counts sequences; M and N count rows, of all sequences if they are packed."""
    inputs: Any
    options: Any

    @property
    def kind(self) -> str:
        return "dense" if self.inputs.cu_seqlens is None else "varlen"

    @property
    def described(self) -> str:
        x = self.inputs
        return self.shape.described(*(t.shape[1] for t in (x.q, x.k, x.v)))


@dataclass(frozen=True, eq=False)
class Family:
    """What the operators of a family have in common, whatever computes them.

    The first inputs are differentiable, those of the fields of `Gradients`. Dimension 2 of the
    first input counts the tokens.
    """

    name: str
    """Of the operators: <name>_forward, <name>_backward and <name>_steps."""
    functions: tuple[str, str]
    """Names of the public functions: of a whole call, and of steps."""
    Inputs: Any
    """Named tuple of the tensors, with `cu_seqlens`. Those of steps come first."""
    Options: Any
    """Named tuple of the options that are no tensors. Those of steps come first."""
    Results: Any
    Cotangents: Any
    """Gradients of the results except `intermediate` ones, in their order."""
    Gradients: Any
    """None for inputs that are not given, and for flagged ones whose gradient is not wanted."""
    overwritten: tuple[str, ...]
    """Inputs that steps overwrite by the results of these names."""
    reference: Callable[[Any, Any], Any]
    """Returns the results in plain torch, which differentiates them to any order; `intermediate`
    ones are not computed."""
    empty_results: Callable[[Any, Any], Any]
    """Returns results that are not computed."""
    Saved: Any = Nothing
    """Named tuple of the results that the backward pass takes."""
    intermediate: tuple[str, ...] = ()
    """Results without a gradient."""
    flagged: tuple[str, ...] = ()
    """Inputs whose gradient the backward pass computes only if it is wanted."""
    laid_out: int = 3
    """The first inputs, whose gradients have their order of dimensions; others are contiguous."""
    pack_options: Callable[[Any], tuple[Any, ...]] = tuple
    """Returns the options as arguments of operators."""
    unpack_options: Callable[[Any], Any] = lambda options: options
    """Inverse of `pack_options`, of `Options` that hold arguments of operators."""
    step_counts: tuple[int, ...] = field(init=False)
    """Numbers of the inputs and options of steps. Not a cached property: dynamo reads it."""

    def __post_init__(self) -> None:
        groups = table(self.Inputs), table(self.Options)
        counts = (sum("steps" in row.layouts for row in rows) for rows in groups)
        object.__setattr__(self, "step_counts", tuple(counts))

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return table(self.Inputs, self.Options)

    @cached_property
    def backward_fields(self) -> tuple[Field, ...]:
        flags = (Field(f"{x}_needs_grad", "bool", "", "backward", False) for x in self.flagged)
        return (*table(self.Cotangents, self.Saved), *self.fields, *flags)

    @cached_property
    def step_fields(self) -> tuple[Field, ...]:
        kinds = {name: f"Tensor({'abc'[n]}!)" for n, name in enumerate(self.overwritten)}
        steps = (row for row in self.fields if "steps" in row.layouts)
        return tuple(row._replace(kind=kinds.get(row.name, row.kind)) for row in steps)

    @cached_property
    def schemas(self) -> tuple[str, str, str]:
        """Of a forward pass, of a backward pass, and of steps."""
        names = [f"{x}_end" if x in self.overwritten else x for x in self.Results._fields]
        results = ", ".join(f"Tensor {name}" for name in names)
        gradients = ", ".join(f"Tensor d{name}" for name in self.Gradients._fields)
        return (
            f"({schema_of(self.fields)}) -> ({results})",
            f"({schema_of(self.backward_fields)}) -> ({gradients})",
            f"({schema_of(self.step_fields)}) -> Tensor {names[0]}",
        )

    @property
    def names(self) -> tuple[str, str, str]:
        return f"{self.name}_forward", f"{self.name}_backward", f"{self.name}_steps"

    @property
    def differentiable(self) -> int:
        """The number of differentiable inputs."""
        return len(self.Gradients._fields)

    def pack(self, x: Any, options: Any) -> tuple[Any, ...]:
        """Returns the arguments of a forward operator."""
        return *x, *self.pack_options(options)

    def unpack(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Inverse of `pack`."""
        x, options = split(arguments, self.Inputs, self.Options)
        return x, self.unpack_options(options)

    def pack_backward(self, call: BackwardCall) -> tuple[Any, ...]:
        """Returns the arguments of a backward operator."""
        return *call.cotangents, *call.saved, *self.pack(call.x, call.options), *call.flags

    def unpack_backward(self, arguments: Sequence[Any]) -> BackwardCall:
        """Inverse of `pack_backward`."""
        end = len(arguments) - len(self.flagged)
        groups = self.Cotangents, self.Saved, self.Inputs, self.Options
        cotangents, saved, x, options = split(arguments[:end], *groups)
        flags = tuple(arguments[end:])
        return BackwardCall(cotangents, saved, x, self.unpack_options(options), flags)

    def pack_steps(self, x: Any, options: Any) -> tuple[Any, ...]:
        """Returns the arguments of the operator of steps."""
        inputs, numbers = self.step_counts
        return *x[:inputs], *self.pack_options(options)[:numbers]

    def unpack_steps(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Inverse of `pack_steps`; other fields have their defaults."""
        given = {row.name: x for row, x in zip(self.step_fields, arguments, strict=True)}
        return self.unpack([given.get(row.name, row.default) for row in self.fields])

    def with_gradient(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the values of the results without `intermediate` ones."""
        if not self.intermediate:
            return tuple(results)
        named = zip(self.Results._fields, results, strict=True)
        return tuple(y for name, y in named if name not in self.intermediate)

    def wanted(self, call: BackwardCall) -> list[bool]:
        """For each differentiable input True if the backward pass computes its gradient."""
        flags = dict(zip(self.flagged, call.flags, strict=True))
        names = self.Gradients._fields
        return [flags.get(n, x is not None) for n, x in zip(names, call.x, strict=False)]

    def gradients(self, call: BackwardCall, outputs: Sequence[Tensor]) -> Any:
        """The outputs of a backward operator; those that are not wanted become None."""
        wanted = zip(outputs, self.wanted(call), strict=True)
        return self.Gradients._make(g if wants else None for g, wants in wanted)

    def forward_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(self.empty_results(*self.unpack(arguments)))

    def backward_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        call = self.unpack_backward(arguments)
        gradients: list[Tensor | None] = [None] * self.differentiable
        for n, wants in enumerate(self.wanted(call)):
            x = call.x[n]
            if wants and n < self.laid_out:
                gradients[n] = empty_like_layout(x, *x.shape[3:])
            elif wants:
                gradients[n] = x.new_empty(x.shape)
        return outputs_of(gradients)

    def steps_fake(self, *arguments: Any) -> Tensor:
        result: Tensor = self.empty_results(*self.unpack_steps(arguments))[0]
        return result


def outputs_of(gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Returns the outputs of a backward operator: without elements in place of None."""
    one = next(x for x in gradients if x is not None)
    return tuple(one.new_empty(0) if x is None else x for x in gradients)
