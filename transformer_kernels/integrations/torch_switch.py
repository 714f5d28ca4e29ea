"""Switch that replaces torch's attention by these kernels: `enable`, `disable` and `enabled`."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled

from ..backends.native import extension
from ..common import torch_private
from ..dispatch import division
from . import torch_devices, torch_jagged, torch_mha, torch_varlen
from .torch_sdpa import scaled_dot_product_attention

FLASH_NAME = "transformer_kernels"
"""The name of these kernels in `torch.nn.attention.activate_flash_attention_impl`. It is registered
when this package is imported; nothing is replaced before it is activated."""

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = {"cpu": ("CPU", "AutogradCPU"), "cuda": ("CUDA", "AutogradCUDA")}


@dataclass
class _Switch:
    """The state of the replacement in this process. The lock protects every change."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    on: bool = False
    by_enable: bool = False
    blocks: int = 0
    """`enabled()` blocks that are open, in all threads."""
    library: torch.library.Library | None = None
    guarded: bool = False
    """Compiled code has guards on `on`, which it has only while the library is registered."""
    unguarded: bool = False
    """Compiled code should have such guards, but torch lacks the symbols."""


class _GraphCache(threading.local):
    """torch.compile's on-disk graph cache, which each thread turns on or off for itself.

    It is keyed by the names of operators: it would return torch's graphs instead of ours.
    """

    before: bool | None = None
    """The setting before the replacement turned it off."""

    def follow_switch(self) -> None:
        if _SWITCH.on and self.before is None:
            self.before = torch_private.set_graph_cache(False)
        elif not _SWITCH.on and self.before is not None:
            torch_private.set_graph_cache(self.before)
            self.before = None


_SWITCH = _Switch()
_GRAPH_CACHE = _GraphCache()


def enable() -> None:
    """Replaces torch's attention by these kernels, in all threads.

    It replaces `scaled_dot_product_attention` on CPUs, and on CUDA devices if these kernels can run
    there, for every caller: training, dropout, jagged nested tensors, `nn.MultiheadAttention`, code
    that imported the function earlier, and compiled functions, once for each state. A call that
    these kernels do not support runs torch's implementation, with a warning that gives the
    reason; inside `torch.nn.attention.sdpa_kernel` without FLASH_ATTENTION, every call does. Within
    `distributed.context_parallel`, both are errors.
    `torch.nn.attention.varlen.varlen_attn`, which torch has on GPUs only, runs on CPUs.

    `disable()` undoes the replacement. A second call has no effect. docs/drop-in.md has the
    details.

    Raises:
        RuntimeError: the compiled extension is not available, or this torch release lacks a private
            symbol that the replacement needs.
    """
    _check_available()
    with _SWITCH.lock:
        _SWITCH.by_enable = True
        _update()


def disable() -> None:
    """Undoes `enable()`. torch's own attention is back once no `enabled()` block is open."""
    with _SWITCH.lock:
        _SWITCH.by_enable = False
        _update()


@contextmanager
def enabled() -> Iterator[None]:
    """Context manager: the replacement is in effect until the last such block of all threads ends.

    Raises:
        RuntimeError: as for `enable`.
    """
    _check_available()
    with _SWITCH.lock:
        _SWITCH.blocks += 1
        _update()
    try:
        yield
    finally:
        with _SWITCH.lock:
            _SWITCH.blocks -= 1
            _update()


def _check_available() -> None:
    unavailable = extension.unavailable_reason()
    if unavailable is not None:
        raise RuntimeError(f"enable() needs the CPU kernels, but {unavailable}")
    if torch_private.MISSING_FOR_SDPA:
        missing = ", ".join(torch_private.MISSING_FOR_SDPA)
        raise RuntimeError(f"enable() needs {missing}, which torch {torch.__version__} lacks")


def _update() -> None:
    """Turns the replacement on or off. The caller holds the lock."""
    wanted = _SWITCH.by_enable or _SWITCH.blocks > 0
    if wanted == _SWITCH.on:
        return
    with torch_private.compile_lock():  # what is being compiled has guards on the present state
        if wanted:
            _register()
            torch_mha.replace()
            torch_jagged.replace()
        else:
            torch_jagged.restore()
            torch_mha.restore()
            _unregister_if_unused()
        _SWITCH.on = wanted
        _GRAPH_CACHE.follow_switch()
        if _SWITCH.unguarded:
            _forget_compiled_code()


def _register() -> None:
    if _SWITCH.library is None:
        torch_devices.find()
        library = torch.library.Library("aten", "IMPL")
        for device in torch_devices.REPLACED:
            for key in _KEYS[device]:
                library.impl("scaled_dot_product_attention", _replacement, key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has a kernel for vmap, and says so
            library.impl("scaled_dot_product_attention", _replacement, "FuncTorchVmapMode")
        torch_varlen.register(library, is_on=lambda: _SWITCH.on)
        _SWITCH.library = library
        torch_private.forget_kernel(_SDPA)
        _forget_compiled_code()  # it has no guards


def _forget_compiled_code() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _SWITCH.guarded = _SWITCH.unguarded = False


def _unregister_if_unused() -> None:
    """Unregisters the replacement if this is the only thread, and no compiled code has guards.

    Calls of another thread may be inside torch's dispatcher, without the GIL: unregistering would
    free the kernel that they are about to call. Code compiled without the replacement would have no
    guards. The replacement then stays, and calls torch's implementation.
    """
    if _SWITCH.library is None or _SWITCH.guarded:
        return
    if len(sys._current_frames()) == 1:
        torch_private.remove_library(_SWITCH.library)
        _SWITCH.library = None
        torch_private.forget_kernel(_SDPA)


def _replacement(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch_private.is_being_compiled(query):
        _guard_compiled_code()
    refusal: Exception | None = None
    is_ours = _SWITCH.on and query.device.type in torch_devices.REPLACED
    if is_ours and flash_sdp_enabled():
        try:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        except (TypeError, ValueError) as error:
            if division.current is not None:
                raise
            refusal = error
    division.check_undivided("torch's own attention")
    o: Tensor = torch_private.call_composite(
        _SDPA,
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    if refusal is not None:
        warnings.warn(f"falling back to torch's own attention: {refusal}", stacklevel=2)
    return o


def _guard_compiled_code() -> None:
    """Makes the code that is being compiled valid for the present state of the switch only."""
    if torch_private.guard_compiled_code(f"{__name__}._SWITCH.on"):
        _SWITCH.guarded = True
    else:
        _SWITCH.unguarded = True
    _GRAPH_CACHE.follow_switch()


class _Activation:
    """The handle of `torch.nn.attention.activate_flash_attention_impl`."""

    def __init__(self) -> None:
        enable()

    def remove(self) -> None:
        """Called by `torch.nn.attention.restore_flash_attention_impl`."""
        disable()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(FLASH_NAME, register_fn=_Activation)
