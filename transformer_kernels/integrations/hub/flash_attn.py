"""The kernel "flash-attn": the functions of flash_attn, for packages that remove padding."""

from __future__ import annotations

from .. import flash_attn
from ..flash_attn import *  # noqa: F403
from ..flash_attn.bert_padding import pad_input, unpad_input

__all__ = [*flash_attn.__all__, "pad_input", "unpad_input"]
