"""Triton kernels. Triton's compiler runs these files, not Python.

forward.py           o and lse
decode.py            o and lse of queries to a cache, split over keys
cache.py             pages, and scales of int8 keys: their arguments, loads of a block of keys
backward.py          dk and dv; dq
score_gradient.py    backward preprocess, and the score gradient ds of one tile
option_gradients.py  gradients of a bias, of a relative bias and of relative keys
scores.py            score options: their arguments, products to scores and back
masks.py             masks: their arguments, and element masks
dropout.py           dropout: its arguments, and the dropout mask (Philox)
block_ranges.py      blocks that a row block visits
block_lists.py       block mask and lists of blocks, for masks that are tensors
arguments.py         the other arguments
primitives.py        addresses, loads and stores
"""
