"""The gated delta rule: linear attention whose state replaces the value of a key instead of adding.

types.py        the tensors and options of a call, its results and gradients
"""
