"""The gated delta rule: linear attention whose state replaces the value of a key instead of adding.

types.py      the tensors and options of a call, its results and gradients
checks.py     validation
reference.py  the definition in plain torch, which torch differentiates
triton/       the triton backend
backends.py   its family of operators, and its backends in order
"""
