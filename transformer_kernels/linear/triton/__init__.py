"""The triton backend of linear attention: any GPU that Triton supports, and Triton's interpreter.

kernels/      the Triton kernels
tiles.py      chunk and slice for each chip, precision and width
call.py       one call: tensors, sizes, segments, memory
launch.py     host side of a forward pass, a backward pass and steps
backend.py    interface to dispatch
report.py     offline compilation of every tile

docs/linear.md, section 6, explains the design.
"""

from .backend import TritonLinear

__all__ = ["TritonLinear"]
