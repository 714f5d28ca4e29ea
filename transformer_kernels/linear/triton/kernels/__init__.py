"""Triton kernels of linear attention. Triton's compiler runs these files, not Python.

states.py      states at the boundaries of segments: sums of each segment, then prefix sums
results.py     o, dq, dk or dv of a chunk
decay.py       sums of log-decays within a chunk, their exponentials, dlog_decay
statistics.py  1 / l and do . o of the queries
steps.py       the recurrence, token by token
arithmetic.py  feature maps and their derivatives; matrix products in every precision
segments.py    position of a program and of a chunk in the sequences
memory.py      loads and stores of rows and states
arguments.py   kernel arguments

docs/linear.md has the formulas.
"""
