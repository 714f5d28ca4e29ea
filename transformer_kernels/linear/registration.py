"""What torch needs to know of the operators of a family: schemas and kernels of those of Triton,
and for all of them fake implementations, derivatives and vmap."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..backends.triton.operators import register
from ..common.storage import check_storage
from ..common.torch_private import MISSING_FOR_OPERATORS, have_tangents
from ..dispatch.operator_rules import (
    ENTRIES,
    batch_of,
    check_no_tangents,
    register_derivative,
    register_vmap,
)
from .backends import Kernels
from .family import Family, outputs_of
from .run import attach, attach_backward


def register_compiled(family: Family, namespace: str) -> None:
    """Registers all of this for the compiled operators in a namespace."""
    kernels = Kernels(family, namespace=namespace)
    for name, fake in zip(kernels.names, _fakes(family), strict=True):
        torch.library.register_fake(f"{namespace}::{name}", fake)
    _register_rules(kernels)


def register_triton(family: Family, launch: str) -> None:
    """Defines the Triton operators, whose kernels the functions `forward`, `backward` and `steps`
    of the module `launch` run. The first call imports it, and Triton."""

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        x, options = family.unpack(arguments)
        check_storage(x._asdict().items())
        with torch.cuda.device_of(x[0]):  # Triton launches on the current device
            return tuple(import_module(launch).forward(x, options))

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        call = family.unpack_backward(arguments)
        names = (field.name for field in family.backward_fields)
        check_storage(zip(names, arguments, strict=True))
        with torch.cuda.device_of(call.x[0]):
            return outputs_of(import_module(launch).backward(call))

    def steps(*arguments: Any) -> Tensor:
        x, options = family.unpack_steps(arguments)
        check_storage(x._asdict().items())
        with torch.cuda.device_of(x[0]):
            o: Tensor = import_module(launch).steps(x, options)
        return o

    kernels = Kernels(family, "triton_")
    runs: tuple[Callable[..., Any], ...] = (forward, backward, steps)
    for definition in zip(kernels.names, family.schemas, runs, _fakes(family), strict=True):
        register(*definition)
    _register_rules(kernels)


def _fakes(family: Family) -> tuple[Callable[..., Any], ...]:
    return family.forward_fake, family.backward_fake, family.steps_fake


def _register_rules(kernels: Kernels) -> None:
    """Makes operators differentiable, and defines their vmap."""
    if MISSING_FOR_OPERATORS:
        return
    family, namespace = kernels.family, kernels.namespace
    forward, backward, steps = kernels.names
    unpack, unpack_backward = family.unpack, family.unpack_backward

    def with_derivative(*arguments: Any) -> Any:
        x, options = unpack(arguments)
        if have_tangents(x):
            return tuple(family.reference(x, options))
        return attach(kernels, x, options)

    def backward_with_derivative(*arguments: Any) -> tuple[Tensor, ...]:
        check_no_tangents(arguments)
        return outputs_of(attach_backward(kernels, unpack_backward(arguments)))

    def refuse(*arguments: Any) -> Tensor:
        whole, by_steps = family.functions
        raise NotImplementedError(
            f"{by_steps} has no derivative: call it under torch.no_grad(), or use {whole}()"
        )

    register_derivative(namespace, forward, with_derivative)
    register_derivative(namespace, backward, backward_with_derivative)
    register_derivative(namespace, steps, refuse)
    batches = [batch_of(field) for field in family.fields]
    # the gradient of a tensor that all entries share is a sum over them
    is_shared = any(batch.dimension is None for batch in batches[: family.differentiable])
    register_vmap(
        namespace,
        forward,
        batches,
        [ENTRIES] * len(family.Results._fields),
        lambda arguments: unpack(arguments)[0].cu_seqlens is not None,
    )
    register_vmap(
        namespace,
        backward,
        [batch_of(field) for field in family.backward_fields],
        [ENTRIES] * family.differentiable,
        lambda arguments: is_shared or unpack_backward(arguments).x.cu_seqlens is not None,
    )
