"""Triton kernels: any GPU that Triton supports, and Triton's interpreter on the CPU.

kernels/ is in Triton's language: forward, backward, and what they share. config.py has every tile
with its reason, launch.py the host side of a pass; operators.py and backend.py are what torch and
dispatch see. docs/triton.md tells how it works.
"""

from transformer_kernels.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
