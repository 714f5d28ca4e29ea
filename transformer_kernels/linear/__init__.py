"""Recurrent operators: linear attention and its relatives, whose state has a fixed size.

Of any of them, called a family:
family.py        its tables of arguments: schemas, packing, fake implementations
backends.py      classes of backends
run.py           choice of the backend, gradients
registration.py  what torch knows of the operators: derivatives, vmap

Linear attention, where softmax is replaced by a feature map:
types.py         its tensors, options and state; feature maps by name
checks.py        validation
reference.py     the chunked form in plain torch, which torch differentiates
attention.py     its family, and its backends in order
triton/          the triton backend

delta/           the gated delta rule

docs/linear.md specifies linear attention.
"""
