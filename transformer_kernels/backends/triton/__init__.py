"""Triton kernels: any GPU that Triton supports, and its interpreter on the CPU.

    forward.py        the forward kernel        forward pass of docs/attention.md
    backward.py       dk and dv; dq             its backward pass
    gradients.py      one tile of it
    bias_gradient.py  dbias
    primitives.py visibility.py dropout.py      loads and scores, masks, dropout's bits
    block_lists.py    which blocks to visit, where a mask is a tensor
    config.py         every tile with its reason
    launch.py         outputs and launches; operators.py, backend.py: what torch and dispatch see
"""

from transformer_kernels.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
