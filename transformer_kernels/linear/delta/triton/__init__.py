"""The triton backend of the gated delta rule.

kernels/      the Triton kernels
tiles.py      chunk and slice for each chip, precision and width
passes.py     one call: tensors, sizes, memory
launch.py     host side of a forward pass, a backward pass and steps

docs/linear.md explains the design.
"""
