"""Score modifiers: softcap, ALiBi, biases and keys by distance, attention sinks and dropout."""

from .alibi import Alibi, alibi, alibi_slopes

__all__ = ["Alibi", "alibi", "alibi_slopes"]
