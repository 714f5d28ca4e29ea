"""Access to private torch symbols, each of them optional. No other module uses private symbols.

A torch release may rename any of them. If one is missing, the feature that needs it is disabled,
`info()` lists the symbol, and the rest of the package works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import torch._functorch.config
import torch._functorch.pyfunctorch
import torch._functorch.utils
import torch._guards
from torch.autograd import forward_ad

with suppress(ImportError):
    import torch.nested._internal.ops

_MISSING = object()
_Function = TypeVar("_Function", bound=Callable[..., object])


def _find(path: str) -> Any:
    """Returns the object at `torch.<path>`, or _MISSING."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, _MISSING)
    return found


_FAST_PATH = (
    "_C._are_functorch_transforms_active",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_C._is_any_autocast_enabled",
    "_C._get_tracing_state",
    "_C._autograd._profiler_enabled",
    "autograd.forward_ad._current_level",
)
(
    _functorch_is_active,
    _dispatch_modes,
    _function_modes,
    _autocast_is_enabled,
    _tracing_state,
    _profiler_is_enabled,
) = map(_find, _FAST_PATH[:-1])  # _current_level changes: it is read at each call
_OPERATORS = (
    "_C._AutoDispatchBelowAutograd",
    "_C._after_autograd_keyset",
    "_C._any_requires_grad",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.is_batchedtensor",
    "_C._functorch.get_unwrapped",
    "_functorch.pyfunctorch.retrieve_all_functorch_interpreters",
    "_functorch.utils.enable_single_level_autograd_function",
)
(
    _below_autograd,
    _below_autograd_keys,
    _any_requires_grad,
    _is_wrapped,
    _is_batched,
    _unwrapped,
    _interpreters,
    _single_level,
) = map(_find, _OPERATORS)
_SDPA = (
    "_C.DispatchKey.CompositeImplicitAutograd",
    "_functorch.config.enable_autograd_cache",
    "_guards.TracingContext.try_get",
    "ops.aten.scaled_dot_product_attention.default._op_dk",
    "ops.aten.scaled_dot_product_attention.default._dispatch_cache",
    "library.Library._destroy",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "jit._builtins._register_builtin",
)
_JAGGED = (
    "nested._internal.ops.jagged_scaled_dot_product_attention",
    "nested._internal.nested_tensor.nested_view_from_values_offsets_lengths",
    "nested._internal.nested_tensor.NestedTensor._maybe_max_seqlen",
)
_VARLEN = (
    "ops.aten._flash_attention_forward.default",
    "ops.aten._flash_attention_forward_no_dropout_inplace.default",
    "ops.aten._flash_attention_backward.default",
)
_tracing_context = _find("_guards.TracingContext.try_get")
_composite_key = _find("_C.DispatchKey.CompositeImplicitAutograd")
native_multi_head_attention = _find("_native_multi_head_attention")
transformer_encoder_layer = _find("_transformer_encoder_layer_fwd")
jagged_attention, jagged_view = map(_find, _JAGGED[:2])
varlen_operators = tuple(map(_find, _VARLEN))
_OTHERS = ("_subclasses.fake_tensor.FakeTensor", "_assert_async")
_fake_tensor, _assert_async = map(_find, _OTHERS)


below_autograd: Callable[[], AbstractContextManager[object]] = (
    nullcontext if _below_autograd is _MISSING else _below_autograd
)
"""Inside `with below_autograd()`, an operator runs its kernel without its derivative."""


def _missing(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"torch.{path}" for path in paths if _find(path) is _MISSING)


MISSING_FOR_FAST_PATH = _missing(_FAST_PATH)
"""Symbols required by the fast path that this torch release lacks."""
MISSING_FOR_OPERATORS = _missing(_OPERATORS)
"""Symbols required for derivatives and vmap of operators that this torch release lacks. Compiled
code and torch.func then run the reference."""
MISSING_FOR_SDPA = _missing(_SDPA)
"""Symbols required by `enable()` that this torch release lacks."""
MISSING_FOR_JAGGED = _missing(_JAGGED)
"""Symbols required for jagged nested tensors that this torch release lacks."""
MISSING_FOR_VARLEN = _missing(_VARLEN)
"""Symbols required for `varlen_attn` on CPUs that this torch release lacks."""
MISSING = (
    *MISSING_FOR_FAST_PATH,
    *MISSING_FOR_OPERATORS,
    *MISSING_FOR_SDPA,
    *MISSING_FOR_JAGGED,
    *MISSING_FOR_VARLEN,
    *_missing(_OTHERS),
)


def constant_in_compiled_code(function: _Function) -> _Function:
    """Decorator: compiled code has the function's result as a constant.

    `torch.compiler.assume_constant_result` does the same, and imports torch.compile, which takes
    more than a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def calls_are_observed() -> bool:
    """True if a mode, transform, tracer or profiler may intercept operator calls.

    Direct calls must not be used then. Requires an empty MISSING_FOR_FAST_PATH.
    """
    return operators_are_observed() or _autocast_is_enabled()


def operators_are_observed() -> bool:
    """The same without autocast, for calls whose tensors have been cast."""
    return calls_are_transformed() or _profiler_is_enabled()


def autocast_is_enabled() -> bool:
    """True if autocast is enabled for any device. Requires an empty MISSING_FOR_FAST_PATH."""
    return bool(_autocast_is_enabled())


def calls_are_transformed() -> bool:
    """True if a mode, transform or tracer may replace tensors or torch functions.

    The fast paths must not be used then. Requires an empty MISSING_FOR_FAST_PATH.
    """
    return (
        torch.compiler.is_compiling()
        or _functorch_is_active()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
    )


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Raises an error if a bool tensor is False: on a GPU by an assertion on the device, without
    waiting; in compiled code when that code runs. If torch lacks the symbol, it waits, and compiled
    code has no check."""
    if _assert_async is not _MISSING:
        _assert_async(condition, message)
    elif not torch.compiler.is_compiling() and not condition:
        raise RuntimeError(message)


def is_fake(x: torch.Tensor) -> bool:
    """True if x has no values: a tensor of FakeTensorMode. False if torch lacks the class."""
    return _fake_tensor is not _MISSING and isinstance(x, _fake_tensor)


def functorch_is_active() -> bool:
    """True if the call is inside a torch.func transform.

    False if torch lacks the symbol; torch then raises its own error for an autograd.Function inside
    a transform.
    """
    return _functorch_is_active is not _MISSING and bool(_functorch_is_active())


def transforms() -> tuple[str, ...]:
    """Names of the torch.func transforms around the call, such as ("Vmap", "Grad"), outermost
    first. Compiled code is guarded by them. Requires an empty MISSING_FOR_OPERATORS."""
    if torch.compiler.is_compiling() or functorch_is_active():
        names: tuple[str, ...] = _transforms()
        return names
    return ()


@constant_in_compiled_code
def _transforms() -> tuple[str, ...]:
    return tuple(level.key().name for level in _interpreters())


def is_batched(x: torch.Tensor) -> bool:
    """True if x is a batch of tensors inside `vmap`. False in compiled code."""
    if MISSING_FOR_OPERATORS or torch.compiler.is_compiling():
        return False
    while _is_wrapped(x) and not _is_batched(x):
        x = _unwrapped(x)
    return bool(_is_batched(x))


def forward_ad_is_active() -> bool:
    """True if tensors may have forward-mode tangents. True if torch lacks the symbol."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def have_tangents(tensors: Iterable[object]) -> bool:
    """True if a tensor has a forward-mode tangent."""
    if not forward_ad_is_active():
        return False
    return any(
        isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
        for x in tensors
    )


def run_kernel(operator: Any, keys: Any, arguments: Sequence[object]) -> Any:
    """Runs the kernel of an operator, whose dispatch keys are given, without its derivative."""
    with below_autograd():
        return operator.redispatch(keys & _below_autograd_keys, *arguments)


def at_one_level() -> AbstractContextManager[object]:
    """Inside it, an autograd.Function serves the torch.func transform that runs the Autograd kernel
    of an operator."""
    context: AbstractContextManager[object] = _single_level()
    return context


def any_requires_grad(arguments: Sequence[object]) -> bool:
    """True in grad mode if a tensor among an operator's arguments requires grad."""
    return torch.is_grad_enabled() and bool(_any_requires_grad(*arguments))


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """Returns `function.apply` without its functorch handling in Python, which costs 2 us per call.
    From torch 2.15 on, it is in C++ and part of the result.

    With it if torch cannot tell whether a transform is active: inside one, it raises an error.
    """
    if _functorch_is_active is _MISSING:
        return function.apply
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def is_being_compiled(x: torch.Tensor) -> bool:
    """True if torch.compile traces an operator whose argument is x.

    It traces each operator, with fake tensors, before it looks into its caches.
    """
    is_plain = type(x) is torch.Tensor and not functorch_is_active()
    return not is_plain and _tracing_context() is not None


def guard_compiled_code(path: str) -> bool:
    """Makes the code that is being compiled valid only for the present value of a bool.

    Args:
        path: "package.module.attribute" of the bool.

    Returns:
        False if torch lacks a symbol for it.
    """
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, ImportSource
    except ImportError:
        return False
    package, *names = path.split(".")
    source: Any = ImportSource(package)
    for name in names:
        source = AttrSource(source, name)
    install_guard(source.make_guard(GuardBuilder.BOOL_MATCH))
    return True


def compile_lock() -> AbstractContextManager[object]:
    """Returns the lock that torch.compile holds while it traces, if it has been imported."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(module, "compile_lock", nullcontext())


def set_graph_cache(enabled: bool) -> bool:
    """Sets torch.compile's on-disk autograd graph cache on or off, in this thread.

    Returns the previous setting.
    """
    config: Any = torch._functorch.config
    before: bool = config.enable_autograd_cache
    config.enable_autograd_cache = enabled
    return before


def remove_library(library: torch.library.Library) -> None:
    """Unregisters the implementations of a library."""
    library._destroy()


def forget_kernel(operator: Any) -> None:
    """Clears an operator's dispatch cache, so that its kernel is looked up again."""
    operator._dispatch_cache.clear()


def set_module_fast_paths(multi_head_attention: Any, encoder_layer: Any) -> None:
    """Sets the functions that nn.MultiheadAttention and nn.TransformerEncoderLayer call."""
    register_builtin = torch.jit._builtins._register_builtin
    # torch.jit.script compiles the operators, whatever the functions are.
    register_builtin(multi_head_attention, "aten::_native_multi_head_attention")
    register_builtin(encoder_layer, "aten::_transformer_encoder_layer_fwd")
    torch._native_multi_head_attention = multi_head_attention
    torch._transformer_encoder_layer_fwd = encoder_layer
    if encoder_layer is transformer_encoder_layer:
        _forget_replaced_operators()


def _forget_replaced_operators() -> None:
    """Clears torch.compile's table of operators if it was filled while torch's were replaced.

    The table is filled by the first compilation of a process, by the names of the operators.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    table = getattr(rules, "get_torch_obj_rule_map", None)
    if (
        table is not None
        and table.cache_info().currsize
        and transformer_encoder_layer not in table()
    ):
        table.cache_clear()


def set_jagged_attention(attention: Any) -> None:
    """Sets the scaled_dot_product_attention of jagged nested tensors."""
    operators: Any = torch.nested._internal.ops
    operators.jagged_scaled_dot_product_attention = attention


def longest_of(jagged: Any) -> int | None:
    """Returns the longest length of a jagged nested tensor if it is known, else None."""
    longest: int | None = jagged._maybe_max_seqlen
    return longest


def ragged_dimension(jagged: Any) -> int | None:
    """Returns the dimension that holds the lengths of a jagged nested tensor.

    None if torch lacks the attribute, which instances have but not their class.
    """
    return getattr(jagged, "_ragged_idx", None)


def call_composite(operator: Any, *args: object, **kwargs: object) -> Any:
    """Calls an operator's CompositeImplicitAutograd implementation."""
    return operator._op_dk(_composite_key, *args, **kwargs)
