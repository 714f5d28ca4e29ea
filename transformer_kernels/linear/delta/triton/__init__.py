"""The triton backend of the gated delta rule: any GPU that Triton supports, and Triton's
interpreter.

kernels/      the Triton kernels
tiles.py      chunk and slice for each chip, precision and width
passes.py     one call: tensors, sizes, memory
launch.py     host side of a forward pass, a backward pass and steps
report.py     offline compilation of every tile

docs/delta.md, section 6, explains the design.
"""
