"""Linear attention over the length: against causal attention, plain torch and other packages.

All variants compute phi = elu + 1, causal and normalized. Results of the first tokens are compared
with float64. Packages that are not installed are left out: pytorch-fast-transformers has a compiled
CPU kernel, fla-core a reference in torch for CPUs and kernels for GPUs.

`gemm` is a matrix product with as many operations as the products of our kernel, without those
above the diagonal: its time over that of `cpu` is the share of the product rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_cases import LINEAR_SUMS, causal
from benchmarks.runner.ceilings import gemm
from benchmarks.runner.checks import attention_contenders, causal_sizes, projected_inputs
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels import Mask, attention, linear_attention
from transformer_kernels.bench import VARIANTS, Attend, Case, Direction, Inputs, run_once
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.trial import failure_reason
from transformer_kernels.linear.types import CHUNK

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 16_384, 65_536)
CHECKED_TOKENS = {"cpu": 512, "cuda": 1024}
"""Tokens that are checked, by type of device; earlier results do not depend on later tokens."""
TOLERANCE = {"cpu": 0.02, "cuda": 0.03}
"""Largest error relative to the largest value: bfloat16 operands, and results of bfloat16"""
LONGEST_CUMULATIVE = 2048
"""Longest sequence for the cumulative sum, whose states of all tokens take D x D numbers each"""
LONGEST_CAUSAL = 16_384
"""From there on causal attention runs in one round"""
EPS = 1e-6
PRODUCTS = {"fwd": (2, 2), "bwd": (6, 5), "fwd+bwd": (8, 7)}
"""Products per chunk: triangles of CHUNK x CHUNK weights, and products with a state"""


@dataclass(frozen=True, kw_only=True)
class ChunkCase(Case):
    """A case whose operations are those of our kernel's products, by chunks."""

    def operations(self, direction: Direction) -> float:
        triangles, states = PRODUCTS[direction]
        chunk = (0.75 * triangles * CHUNK + states * self.D) * CHUNK * self.D
        return 2 * self.B * self.H_q * self.N / CHUNK * chunk


def comparisons() -> Iterator[Comparison]:
    for length in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16):
            case = ChunkCase(name="linear attention", M=length, N=length, dtype=dtype)
            name = f"{length}-{case.dtype_name}"
            yield Comparison(name=name, measurements=partial(over_length, case))


def over_length(case: Case, run: Run) -> Iterator[Measurement]:
    """Measures all variants at one length, after causal attention."""
    makers: dict[str, Callable[[], Attend]] = {
        "cpu": lambda: linear_attention,
        "chunks": lambda: partial(linear_attention, backend="reference"),
        "cumulative sum": lambda: cumulative_sum,
        "fast-transformers": fast_transformers,
        "fla": lambda: fla(case),
    }
    if case.N > LONGEST_CUMULATIVE:
        del makers["cumulative sum"]
    inputs = projected_inputs(case)
    attends, errors, skipped = checked_attends(case, inputs, makers)
    run.skipped += [f"linear attention, {case.N}: {name}: {why}" for name, why in skipped.items()]
    assert not skipped.keys() & {"cpu", "chunks"}, skipped
    softmax = causal_sizes(case.name, H=case.H_q, S=case.N, dtype=case.dtype)
    directions: tuple[Direction, ...] = ("fwd", "fwd+bwd")
    for direction in directions:
        baseline = attention_contenders(
            softmax, direction, {"causal": partial(attention, mask=Mask.causal())}, inputs, {}
        )
        if case.N > LONGEST_CAUSAL:
            baseline = [replace(one, most_rounds=1) for one in baseline]
        own = attention_contenders(case, direction, attends, inputs, errors)
        product = [gemm(case, direction)] if case.dtype == torch.float32 else []
        yield run.timed([*baseline, *own, *product])


def checked_attends(
    case: Case, inputs: Inputs, makers: Mapping[str, Callable[[], Attend]]
) -> tuple[dict[str, Attend], dict[str, float], dict[str, str]]:
    """Compares the first tokens of each variant, forward and backward, with float64.

    Returns:
        The functions and their errors by variant, and the reasons of those that are not installed,
        fail or are wrong.
    """
    kind = case.device.type
    few = Inputs(*(x[:, :, : CHECKED_TOKENS[kind]] for x in inputs))
    exact = run_once(ours(case, "reference"), Inputs(*(x.double() for x in few)))
    attends: dict[str, Attend] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, make in makers.items():

        def attempt(name: str = name, make: Callable[[], Attend] = make) -> None:
            attend = make()
            error = run_once(attend, few).error(exact, "fwd+bwd")
            assert error < TOLERANCE[kind], f"error {error:.2g} of the largest value"
            attends[name], errors[name] = attend, error

        try:
            reason = failure_reason(attempt)
        except ImportError as error:
            reason = str(error)
        if reason is not None:
            skipped[name] = reason
    return attends, errors, skipped


def phi(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


def cumulative_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The states of all tokens at once, by torch.cumsum."""
    q, k = phi(q), phi(k)
    states = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return _normalized((q[..., None, :] @ states).squeeze(-2), q, k)


def _normalized(o: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return o / ((q * k.cumsum(2)).sum(-1, keepdim=True) + EPS)


def fast_transformers() -> Attend:
    """The kernel of pytorch-fast-transformers with the denominator of its module, in torch."""
    from fast_transformers.causal_product import causal_dot_product

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = phi(q), phi(k)
        return _normalized(causal_dot_product(q, k, v), q, k)

    return attend


def fla(case: Case) -> Attend:
    """flash-linear-attention: its chunked kernel on a GPU, its reference in torch on a CPU."""
    if case.device.type == "cuda":
        from fla.ops.linear_attn import chunk_linear_attn as chunked
    else:
        from fla.ops.linear_attn.naive import naive_chunk_linear_attn as chunked
    normalize = case.name != LINEAR_SUMS

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if normalize:
            q, k = phi(q), phi(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = chunked(q, k, v, scale=1.0, normalize=normalize)
        o: Tensor = found if isinstance(found, Tensor) else found[0]
        return o.transpose(1, 2)

    return attend


def ours(case: Case, backend: str) -> Attend:
    if case.name == LINEAR_SUMS:
        return partial(linear_attention, feature_map="identity", normalize=False, backend=backend)
    return partial(linear_attention, backend=backend)


class LinearContenders:
    """Contenders of a case of the suite `gpu`, checked when they are created."""

    def __init__(self, case: Case, backends: Mapping[str, str]) -> None:
        """Creates the contenders of our backends, by variant, and of fla."""
        self._case = case
        self._inputs = case.inputs()
        makers = {name: partial(ours, case, backend) for name, backend in backends.items()}
        self._attends, self._errors, self.skipped = checked_attends(
            case, self._inputs, {**makers, "fla": partial(fla, case)}
        )

    def contenders(self, direction: Direction) -> list[Contender]:
        """Returns the variants that passed, and causal attention of the same sizes."""
        softmax = causal(self._case.N, self._case.D).to(self._case.device)
        sdpa = {"sdpa": VARIANTS["sdpa"].attend_for(softmax)}
        return [
            *attention_contenders(self._case, direction, self._attends, self._inputs, self._errors),
            *attention_contenders(softmax, direction, sdpa, self._inputs, {}),
        ]
