"""Triton kernels: any GPU that Triton supports, and Triton's interpreter on the CPU.

kernels/           the Triton kernels
config.py          tile sizes for each chip, kernel, element size and width
launch.py          host side of a forward and a backward pass
operators.py       torch operators
backend.py         interface to dispatch
target.py          device detection
compile_report.py  offline compilation of every tile

docs/triton.md explains the design.
"""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
