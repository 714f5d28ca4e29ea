"""Triton kernels of the gated delta rule. Triton's compiler runs these files, not Python.

decay.py       running sums of log-decays, their exponentials, dlog_decay
pairs.py       products of the pairs of tokens of a chunk, and the inverse of its triangular system
scan.py        the scan over chunks: o and the states
reverse.py     the scan from the last chunk: dv and the gradients of the states
gradients.py   dq, dk and dbeta
steps.py       the recurrence, token by token
memory.py      positions, loads and stores
arguments.py   kernel arguments

docs/delta.md has the formulas.
"""
