"""Linear attention: softmax replaced by a feature map, computed in chunks with a recurrent state.

types.py        the validated call, the state, feature maps by name
checks.py       validation
reference.py    the chunked form in plain torch, which torch differentiates
operators.py    schemas and fake implementations of the operators
base.py         base class of a backend
compiled.py     the cpu and cuda backends
triton/         the triton backend
autograd.py     gradients
derivatives.py  derivatives and vmap of the operators
backends.py     the reference backend, and all backends in order
run.py          choice of the backend

docs/linear.md specifies the operator.
"""
