"""Reversible residual layers: the backward pass recomputes each layer's inputs from its outputs.

    y1 = x1 + f(x2),   y2 = x2 + g(y1)            so that   x2 = y2 - g(y1),   x1 = y1 - f(x2)

Only the outputs of the last layer are saved, however many layers there are.

Source: The Reversible Residual Network (Gomez et al., 2017, arXiv:1707.04585); with attention,
Reformer (Kitaev et al., 2020, arXiv:2001.04451), section 3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

Choices = tuple[Tensor, ...]
"""Discrete decisions of a branch, such as an order: tensors without a gradient"""

Gradients = dict[nn.Parameter, Tensor]


class ReversibleBlock(nn.Module, ABC):
    """Two residual branches without residual connections of their own."""

    @abstractmethod
    def f(
        self, x: Tensor, choices: Choices | None = None, **options: Any
    ) -> tuple[Tensor, Choices]:
        """First branch.

        Args:
            x: inputs (B, T, width).
            choices: those of an earlier call, to repeat; None to decide anew. Recomputed inputs
                differ by rounding, which could turn a decision.
            options: the options given to the stack.

        Returns:
            (B, T, width), and the choices. Random numbers for a choice must not come from torch's
            default generators: a repeated call does not draw them, and would shift the dropout.
        """

    @abstractmethod
    def g(self, x: Tensor) -> Tensor:
        """Second branch: x (B, T, width) -> the same shape."""

    def forward(self, branch: Literal["f", "g"], *inputs: Any, **options: Any) -> Any:
        """Runs a branch; the stack calls blocks by this method, which runs their hooks."""
        return getattr(self, branch)(*inputs, **options)


class ReversibleStack(nn.ModuleList):
    """Sequence of reversible blocks, run as one autograd function.

    The backward pass takes one more forward pass, repeats the dropout and the choices of the first
    one, and computes first derivatives only. Residual sums have the dtype of the inputs, also under
    autocast. If `reversible` is False, autograd saves what each block needs.
    """

    reversible = True

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """x1, x2 (B, T, width) -> the same shapes; `options` are passed to each block's `f`."""
        if self.reversible and torch.is_grad_enabled():
            parameters = [p for p in self.parameters() if p.requires_grad]
            y: tuple[Tensor, Tensor] = _Reversible.apply(  # type: ignore[no-untyped-call]
                list(self), options, x1, x2, *parameters
            )
            return y
        for block in self:
            x1 = x1 + block("f", x2, **options)[0]
            x2 = x2 + block("g", x1)
        return x1, x2


class _RandomState(NamedTuple):
    """States of torch's default generators."""

    cpu: Tensor
    device: Tensor | None
    """None on the CPU"""


class _Record(NamedTuple):
    """State that the recomputation of a block starts from, besides its outputs."""

    choices: Choices
    before_f: _RandomState
    before_g: _RandomState


class _Reversible(torch.autograd.Function):
    """A stack as one function. The parameters are inputs, so that `torch.autograd.grad`, hooks and
    DistributedDataParallel receive their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[ReversibleBlock],
        options: dict[str, Any],
        x1: Tensor,
        x2: Tensor,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor]:
        device = x1.device
        records = []
        for block in blocks:
            before_f = _random_state(device)
            y, choices = block("f", x2, **options)
            x1 = x1 + y
            before_g = _random_state(device)
            x2 = x2 + block("g", x1)
            records.append(_Record(choices, before_f, before_g))
        ctx.save_for_backward(x1, x2)
        ctx.blocks, ctx.options, ctx.parameters = blocks, options, parameters
        ctx.records, ctx.autocast = records, _autocast_settings(device)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy1: Tensor, dy2: Tensor) -> tuple[Any, ...]:
        y1, y2 = ctx.saved_tensors
        gradients: Gradients = {}
        for block, record in zip(reversed(ctx.blocks), reversed(ctx.records), strict=True):
            branches = _Recomputed(block, record, ctx.options, ctx.autocast, gradients)
            y, dx = branches.g(y1, dy2)
            y2, dy1 = y2 - y, dy1 + dx
            y, dx = branches.f(y2, dy1)
            y1, dy2 = y1 - y, dy2 + dx
        return None, None, dy1, dy2, *map(gradients.get, ctx.parameters)


class _Recomputed(NamedTuple):
    """The branches of a block, computed again for their gradients."""

    block: ReversibleBlock
    record: _Record
    options: dict[str, Any]
    autocast: dict[str, Any]
    gradients: Gradients
    """Sums of the gradients so far, which each branch adds to"""

    def f(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """First branch at x, and the gradient of x for the gradient dy of the result."""
        choices, options = self.record.choices, self.options
        return self._run(
            lambda call, x: call(("f", x, choices), options)[0], x, dy, self.record.before_f
        )

    def g(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Second branch at x, and the gradient of x, as `f`."""
        return self._run(lambda call, x: call(("g", x)), x, dy, self.record.before_g)

    def _run(
        self, branch: Callable[..., Tensor], x: Tensor, dy: Tensor, state: _RandomState
    ) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        parameters = {n: p for n, p in self.block.named_parameters() if p.requires_grad}
        # Hooks of a parameter belong to its whole gradient, so that the block runs with aliases.
        aliases = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        call = partial(functional_call, self.block, aliases)
        with torch.enable_grad(), torch.autocast(**self.autocast), _random_numbers(state, x.device):
            y = branch(call, x)
        dx, *found = torch.autograd.grad(
            y, (x, *aliases.values()), dy.to(y.dtype), allow_unused=True
        )
        for parameter, gradient in zip(parameters.values(), found, strict=True):
            if gradient is not None:
                before = self.gradients.get(parameter)
                self.gradients[parameter] = gradient if before is None else before + gradient
        return y.detach(), torch.zeros_like(x) if dx is None else dx


def _autocast_settings(device: torch.device) -> dict[str, Any]:
    """Arguments of an autocast context like the current one."""
    return {
        "device_type": device.type,
        "enabled": torch.is_autocast_enabled(device.type),
        "dtype": torch.get_autocast_dtype(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _random_state(device: torch.device) -> _RandomState:
    if device.type == "cpu":
        return _RandomState(torch.get_rng_state(), None)
    return _RandomState(
        torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)
    )


@contextmanager
def _random_numbers(state: _RandomState, device: torch.device) -> Iterator[None]:
    """Context in which the default generators continue from a state; they are restored after it."""
    devices = [] if state.device is None else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.set_rng_state(state.cpu)
        if state.device is not None:
            torch.get_device_module(device).set_rng_state(state.device, device)
        yield
