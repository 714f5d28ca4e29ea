"""Triton kernels. Triton's compiler runs these files, not Python.

forward.py           o and lse
backward.py          dk and dv; dq
score_gradient.py    backward preprocess, and the score gradient ds of one tile
bias_gradient.py     dbias
primitives.py        addresses, loads, stores, scores
masks.py             element masks and block ranges
block_lists.py       block mask and lists of blocks, for masks that are tensors
dropout.py           dropout mask (Philox)
"""
