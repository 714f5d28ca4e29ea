"""Kernels in Triton's language, which looks like Python and is another.

forward.py                      o and lse
backward.py, gradients.py       dk and dv; dq; and one tile of them
bias_gradient.py                dbias
primitives.py, visibility.py    loads and scores; masks, by block and by element
dropout.py                      which weights are kept
block_lists.py                  which blocks to visit, where a mask is a tensor
"""
