"""The gated delta rule and the convolution of hybrid models: against transformers and attention.

- `layer`: one layer of Qwen3-Next over the length, whose heads of q and k serve two heads of v
  each, and one of Kimi Linear, with gates by channel and as many heads of each. Gradients are those
  of q, k, v, log_decay and beta. The rows of causal softmax attention and of `linear_attention`
  with the same decay have as many heads of o.
- `step`: the next token of a sequence.
- `conv`: the convolution of Qwen3-Next with a bias, channels first and as its view of channels
  last; H is the number of channels and D the width. `conv step` is its next token.

`transformers` is what HuggingFace transformers runs on CPUs, in torch; without the package it is
left out. Its many short operations wait for every thread: where other processes use the cores, it
takes up to ten times as long, and `--threads 1` is fairer.

Results and gradients are first compared with our reference in float64, those of a layer for
CHECKED_TOKENS tokens and one head of q and k. BOUND of the dtype is the largest error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import transformer_kernels as tk
from benchmarks.runner.checks import (
    BOUND,
    Sizes,
    attention_contenders,
    projected_inputs,
    relative_error,
)
from benchmarks.runner.run import Comparison, Measurement, Run
from transformer_kernels.bench import Attend, Direction, Inputs
from transformer_kernels.bench.contenders import Contender
from transformer_kernels.bench.timer import SLOW_ROUNDS
from transformer_kernels.bench.workload import Workload

LENGTHS = (512, 1024, 2048, 4096, 16_384)
CHECKED_TOKENS = 160
TRANSFORMERS, BY_CHANNEL, CAUSAL = "transformers", " by channel", "causal"
LONGEST: dict[Direction, dict[str, int]] = {
    "fwd": {TRANSFORMERS: 4096, TRANSFORMERS + BY_CHANNEL: 1024},
    "fwd+bwd": {TRANSFORMERS: 2048, TRANSFORMERS + BY_CHANNEL: 512},
}
"""Longest sequences: transformers takes many seconds, and by channel C x C x D numbers a chunk."""
SLOW: dict[Direction, dict[str, int]] = {
    "fwd": {TRANSFORMERS + BY_CHANNEL: 1024, CAUSAL: 16_384},
    "fwd+bwd": {TRANSFORMERS: 2048, TRANSFORMERS + BY_CHANNEL: 512, CAUSAL: 16_384},
}
"""Lengths from which on a variant runs in SLOW_ROUNDS, after the two calls that measure memory"""
PEERS = {
    "": ("qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    BY_CHANNEL: ("kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}
"""Model of transformers, and its functions of many tokens and of one"""
BOTH: tuple[Direction, ...] = ("fwd", "fwd+bwd")
LAYER = Sizes(name="layer", H_q=16, H_kv=32, M=1, N=1, D=128, D_v=128)
CHANNELS = Sizes(name="conv", H_q=8192, H_kv=8192, M=2048, N=2048, D=4, D_v=4)

Tokens = Sequence[Tensor]
Step = Callable[[Tokens, Tensor], Sequence[Tensor]]
"""Arguments and a state, which it may overwrite, -> results and the new state"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Inputs of one form of the gated delta rule; H_q is its heads of q and k, H_kv those of v."""

    suffix: str
    case: Sizes
    inputs: Inputs
    gates: tuple[Tensor, Tensor]
    """log_decay and beta"""

    def part(self, dtype: torch.dtype | None = None) -> Layer:
        """Returns the first tokens of the first head of q and k, and of its heads of v."""
        group, few = self.case.H_kv // self.case.H_q, slice(CHECKED_TOKENS)
        heads = (slice(1), slice(1), slice(group), slice(group))
        inputs = Inputs(*(x[:, h, few].to(dtype) for x, h in zip(self.inputs, heads, strict=True)))
        log_decay, beta = (
            x.detach()[:, :group, few].to(dtype).requires_grad_() for x in self.gates
        )
        return replace(self, inputs=inputs, gates=(log_decay, beta))

    def ours(self, backend: str = "auto") -> Attend:
        log_decay, beta = self.gates
        return partial(
            tk.gated_delta_rule, log_decay=log_decay, beta=beta, l2norm=True, backend=backend
        )

    def theirs(self, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v, *self.gates))
        o: Tensor = function(*rows, use_qk_l2norm_in_kernel=True)[0]
        return o.transpose(1, 2)

    def attends(self, function: Callable[..., Any] | None) -> dict[str, Attend]:
        """Returns our function and that of transformers, by variant."""
        found: dict[str, Attend] = {f"cpu{self.suffix}": self.ours()}
        if function is not None:
            found[TRANSFORMERS + self.suffix] = partial(self.theirs, function)
        return found


def comparisons() -> Iterator[Comparison]:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for length in LENGTHS:
            case = replace(LAYER, M=length, N=length, dtype=dtype)
            yield Comparison(name=f"layer-{length}-{name}", measurements=partial(layers, case))
        step = replace(LAYER, name="step", dtype=dtype)
        yield Comparison(name=f"step-{name}", measurements=partial(steps, step))
        channels = replace(CHANNELS, dtype=dtype)
        yield Comparison(name=f"conv-{name}", measurements=partial(convolutions, channels))
        token = replace(channels, name="conv step", M=1, N=1)
        yield Comparison(name=f"conv step-{name}", measurements=partial(convolution_steps, token))


def layers_of(case: Sizes) -> list[Layer]:
    """Returns the layers with gates by head and by channel: views of one projection, as in a model.

    Gates are those of a token that keeps 95% of the state; log_decay is float32.
    """
    every = replace(case, H_q=case.H_kv)
    q, k, v, do = projected_inputs(every)
    generator = torch.Generator().manual_seed(1)
    shape = (case.B, case.N, case.H_kv, case.D + 1)
    numbers = torch.randn(shape, generator=generator).transpose(1, 2)
    beta = numbers[..., 0].sigmoid().to(case.dtype).requires_grad_()
    by_channel = logsigmoid(numbers[..., 1:] + 3).requires_grad_()
    by_head = by_channel.detach()[..., 0].clone().requires_grad_()
    few = Inputs(q[:, : case.H_q], k[:, : case.H_q], v, do)
    return [
        Layer(suffix="", case=case, inputs=few, gates=(by_head, beta)),
        Layer(suffix=BY_CHANNEL, case=every, inputs=Inputs(q, k, v, do), gates=(by_channel, beta)),
    ]


def peer(run: Run, model: str, name: str) -> Callable[..., Any] | None:
    """Returns a function of transformers in torch, without the kernels that it may be wrapped in.

    Without transformers it returns None, and adds the reason to those of the run.
    """
    try:
        found = import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError as error:
        run.skipped.append(f"{TRANSFORMERS}, {name}: {error}")
        return None
    function: Callable[..., Any] = unwrap(getattr(found, name))
    return function


def outputs(attend: Attend, inputs: Inputs, learned: Sequence[Tensor] = ()) -> list[Tensor]:
    """Returns o and the gradients of three inputs and of what is learned."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, (*leaves, *learned), inputs.do)]


def largest_error(name: str, case: Sizes, got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest `relative_error` of several results. AssertionError beyond BOUND."""
    label = f"{case.name}, {case.dtype_name}, {name}"
    return max(
        relative_error(f"{label}, result {i}", *pair, BOUND[case.dtype])
        for i, pair in enumerate(zip(got, exact, strict=True))
    )


def layers(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures both forms at one length, then linear and softmax attention."""
    forms = layers_of(case)
    checked = []
    for form in forms:
        function = peer(run, *PEERS[form.suffix][:2])
        part, double = form.part(), form.part(torch.float64)
        exact = outputs(double.ours("reference"), double.inputs, double.gates)
        errors = {
            name: largest_error(name, case, outputs(attend, part.inputs, part.gates), exact)
            for name, attend in part.attends(function).items()
        }
        checked.append((form, form.attends(function), errors))
    for direction in BOTH:
        longest, slow = LONGEST[direction], SLOW[direction]
        contenders: list[Contender] = []
        for form, attends, errors in checked:
            short = {name: x for name, x in attends.items() if longest.get(name, case.N) >= case.N}
            contenders += attention_contenders(
                form.case, direction, short, form.inputs, errors, dict.fromkeys(short, form.gates)
            )
        contenders = [
            replace(one, most_rounds=SLOW_ROUNDS)
            if slow.get(one.variant, math.inf) <= case.N
            else one
            for one in [*contenders, *attentions(case, forms, direction)]
        ]
        yield run.timed(contenders, replace(run.budget, fewest=3))


def attentions(case: Sizes, forms: Sequence[Layer], direction: Direction) -> Iterator[Contender]:
    """Yields linear attention with the decay by head, and causal attention with grouped heads."""
    (decay, _), every = forms[0].gates, forms[1]
    q, k, v, do = every.inputs
    linear = partial(tk.linear_attention, feature_map="identity", normalize=False, log_decay=decay)
    learned = {"linear": (decay,)}
    yield from attention_contenders(
        every.case, direction, {"linear": linear}, every.inputs, {}, learned
    )
    grouped = replace(case, H_q=case.H_kv, H_kv=case.H_q, mask_name="causal")
    few = Inputs(q, k[:, : case.H_q], v[:, : case.H_q], do)
    causal = partial(tk.attention, mask=tk.Mask.causal())
    yield from attention_contenders(grouped, direction, {CAUSAL: causal}, few, {})


def steps(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures the next token in both forms, then that of linear attention."""
    contenders = []
    state = torch.randn(case.B, case.H_kv, case.D, case.D_v)
    for form in layers_of(case):
        tokens = [x.detach() for x in (*form.inputs[:3], *form.gates)]
        calls: dict[str, Step] = {f"cpu{form.suffix}": delta_step}
        model, _, recurrent = PEERS[form.suffix]
        if function := peer(run, model, recurrent):
            calls[TRANSFORMERS + form.suffix] = partial(their_delta_step, function)
        exact = delta_step([x.double() for x in tokens], state.double(), "reference")
        contenders += step_contenders(form.case, calls, tokens, state, exact)
    q, k, v, log_decay, _ = tokens
    z = torch.zeros(case.B, case.H_kv, case.D)

    def linear(S: Tensor) -> Tensor:
        return tk.linear_attention_decode(
            q, k, v, tk.LinearState(S, z), feature_map="identity", normalize=False,
            log_decay=log_decay[..., 0],
        )  # fmt: skip

    prepare = partial(prepared, linear, state)
    yield run.timed([*contenders, Contender(form.case, "fwd", "linear", prepare, math.nan)])


def step_contenders(
    case: Sizes, calls: Mapping[str, Step], tokens: Tokens, state: Tensor, exact: Sequence[Tensor]
) -> list[Contender]:
    """Checks the outputs and the states of functions that may overwrite the state."""
    contenders = []
    for name, function in calls.items():
        call = partial(function, tokens)
        error = largest_error(name, case, call(state.clone()), exact)
        contenders.append(Contender(case, "fwd", name, partial(prepared, call, state), error))
    return contenders


def prepared(call: Callable[[Tensor], object], state: Tensor) -> Workload:
    return partial(torch.no_grad()(call), state.clone())


def delta_step(tokens: Tokens, S: Tensor, backend: str = "auto") -> list[Tensor]:
    q, k, v, log_decay, beta = tokens
    return [tk.gated_delta_rule_step(q, k, v, log_decay, beta, S, l2norm=True, backend=backend), S]


def their_delta_step(function: Callable[..., Any], tokens: Tokens, S: Tensor) -> list[Tensor]:
    rows = (x.transpose(1, 2) for x in tokens)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, S = function(*rows, initial_state=S, **options)
    return [o.transpose(1, 2), S]


def convolution_inputs(case: Sizes, *, last: bool) -> Inputs:
    """Returns x, the weight, the bias and the gradient of y."""
    generator = torch.Generator().manual_seed(0)
    channels, width = case.H_q, case.D
    shape = (case.B, case.N, channels) if last else (case.B, channels, case.N)
    x, weight, bias, dy = (
        torch.randn(sizes, generator=generator).to(case.dtype)
        for sizes in (shape, (channels, width), (channels,), shape)
    )
    return Inputs(x.mT, weight, bias, dy.mT) if last else Inputs(x, weight, bias, dy)


def convolutions(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures whole sequences, with gradients of x, the weight and the bias."""
    ours = partial(tk.causal_conv1d, activation="silu")
    attends: dict[str, Attend] = {"cpu": ours}
    if function := peer(run, "qwen3_next", "causal_conv1d_fn"):
        attends[TRANSFORMERS] = partial(function, activation="silu")
    for last in (False, True):
        inputs = convolution_inputs(case, last=last)
        double = Inputs(*(x.double() for x in inputs))
        exact = outputs(partial(ours, backend="reference"), double)
        errors = {
            name: largest_error(name, case, outputs(attend, inputs), exact)
            for name, attend in attends.items()
        }
        named = replace(case, name=f"{case.name}, channels {'last' if last else 'first'}")
        for direction in BOTH:
            yield run.timed(attention_contenders(named, direction, attends, inputs, errors))


def convolution_steps(case: Sizes, run: Run) -> Iterator[Measurement]:
    """Measures the next token."""
    tokens = convolution_inputs(case, last=False)[:3]
    state = torch.randn(case.B, case.H_q, case.D - 1).to(case.dtype)
    calls: dict[str, Step] = {"cpu": convolution_step}
    if update := peer(run, "qwen3_next", "causal_conv1d_update"):
        calls[TRANSFORMERS] = partial(their_convolution_step, update)
    exact = convolution_step([x.double() for x in tokens], state.double(), "reference")
    yield run.timed(step_contenders(case, calls, tokens, state, exact))


def convolution_step(tokens: Tokens, state: Tensor, backend: str = "auto") -> list[Tensor]:
    x, weight, bias = tokens
    y = tk.causal_conv1d_step(x, weight, bias, state, activation="silu", backend=backend)
    return [y, state]


def their_convolution_step(update: Callable[..., Any], tokens: Tokens, S: Tensor) -> list[Tensor]:
    x, weight, bias = tokens
    return [update(x, S, weight, bias, "silu"), S]
