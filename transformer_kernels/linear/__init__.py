"""Linear attention: softmax replaced by a feature map, computed in chunks with a recurrent state.

types.py         the validated call, the state
checks.py        validation
feature_maps.py  feature maps by name
reference.py     the chunked form in plain torch, which torch differentiates
operators.py     schemas and fake implementations of the operators
base.py          base class of a backend
cpu.py           the cpu backend
cuda.py          the cuda backend
triton/          the triton backend
backends.py      the reference backend, and all backends in order
autograd.py      gradients
derivatives.py   derivatives and vmap of the operators
run.py           choice of the backend

docs/linear.md specifies the operator.
"""
