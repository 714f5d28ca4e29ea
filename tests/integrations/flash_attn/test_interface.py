"""`flash_attn.flash_attn_interface`: the log-sum-exp, and the internal functions of both passes."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.integrations.flash_attn.plain import (
    OPTIONS,
    PACKED_OPTIONS,
    assert_agrees,
    attend,
    by_sequence,
    in_pages,
    starts,
    with_gradients,
)
from tests.support.operators import FORWARD, operators_run_by
from tests.support.tiers import each
from transformer_kernels.backends import BACKENDS, Backend, ReferenceBackend
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.integrations import flash_attn
from transformer_kernels.integrations.flash_attn import arguments
from transformer_kernels.integrations.flash_attn import flash_attn_interface as interface

SCORES = (
    "dropout_p, softmax_scale, causal, window_size_left{}, window_size_right{}, softcap{}, "
    "alibi_slopes{}"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
WITHOUT_DEFAULTS = SCORES.format("", "", "", "")
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, {WITHOUT_DEFAULTS}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, {SCORES.format('=-1', '=-1', '=0.0', '=None')}, "
        "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": f"{GRADIENTS}, {WITHOUT_DEFAULTS}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": (
        f"{GRADIENTS}, {LENGTHS}, {WITHOUT_DEFAULTS}, deterministic, rng_state=None, "
        "zero_tensors=False"
    ),
}
"""The signatures in flash_attn 2.8.4, without types."""
attention: Any = tk.attention  # untyped: the calls unpack their tensors
attention_varlen: Any = tk.attention_varlen
LENGTHS_Q, LENGTHS_K = (3, 70, 17), (5, 35, 40)
OFFSETS = starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)


@pytest.fixture(autouse=True)
def _first_warning() -> Iterator[None]:
    """The first call of each test may warn, and the tests that ignore it do not depend on it."""
    arguments._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "return_attn_probs=True returns None", UserWarning)
        yield


def drawn(dtype: torch.dtype, M: int = 35, N: int = 67) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (torch.randn(3, N, 2, 24, dtype=dtype) for _ in range(2))
    return torch.randn(3, M, 4, 24, dtype=dtype), k, v


def packed(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (torch.randn(sum(LENGTHS_K), 2, 24, dtype=dtype) for _ in range(2))
    return torch.randn(sum(LENGTHS_Q), 4, 24, dtype=dtype), k, v


def test_signatures() -> None:
    """Callers read them with `inspect.getfullargspec`, which does not look into decorators."""
    for name, expected in SIGNATURES.items():
        function = getattr(interface, name)
        parameters = inspect.signature(function).parameters.values()
        assert ", ".join(str(x.replace(annotation=x.empty)) for x in parameters) == expected
        assert inspect.getfullargspec(function).args == [x.name for x in parameters]
    assert sorted(interface.__all__) == sorted([*flash_attn.__all__, *SIGNATURES])
    for name in flash_attn.__all__:
        assert getattr(interface, name) is getattr(flash_attn, name)


def test_warns_once_that_there_are_no_probabilities() -> None:
    q, k, v = drawn(torch.float32)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(2):
            assert flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[2] is None
            interface._flash_attn_forward(q, k, v, 0.5, None, False, -1, -1, 0.0, None, True)
    assert [str(x.message).partition(",")[0] for x in record] == [
        f"{name}=True returns None in place of the attention probabilities"
        for name in ("return_attn_probs", "return_softmax")
    ]


@pytest.mark.parametrize("sizes", [(35, 67), (67, 35)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_log_sum_exp(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    """And its gradient, which flash_attn does not have."""
    q, k, v = drawn(torch.float32, *sizes)

    def call(q: Tensor, k: Tensor, **options: Any) -> Tensor:
        lse: Tensor
        o, lse, _ = flash_attn.flash_attn_func(
            q, k, v.to(q.dtype), **options, return_attn_probs=True
        )
        assert torch.equal(o, flash_attn.flash_attn_func(q, k, v, **options))
        return lse

    def expected(q: Tensor, k: Tensor, **options: Any) -> Tensor:
        return attend(q, k, v.to(q.dtype), **options)[1]

    assert_agrees(call, expected, (q, k), **options)


@each("options", OPTIONS.values(), ids=OPTIONS)
def test_log_sum_exp_of_packed_sequences(options: dict[str, Any]) -> None:
    q, k, v = packed(torch.float32)
    expected = by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, lse=True, **options)
    call: Any = flash_attn.flash_attn_varlen_func
    options = {**options, "return_attn_probs": True}
    o, lse, none = call(q, k, v, *OFFSETS, **options)
    assert none is None
    assert_same_function(lse, expected)
    table = torch.arange(9).view(3, 3)
    pages = (in_pages(x, LENGTHS_K, 16, table) for x in (k, v))
    assert_same_function(call(q, *pages, *OFFSETS, block_table=table, **options)[:2], (o, lse))


@each("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_log_sum_exp_of_packed_forms(options: dict[str, Any]) -> None:
    options = {**options, "return_attn_probs": True}
    q, _, _ = drawn(torch.float32)
    k, v = q.flip(1), q.flip(2)
    o, lse, _ = flash_attn.flash_attn_func(q, k, v, **options)
    cu_seqlens, rows = starts((35, 35, 35)), [x.flatten(0, 1) for x in (q, k, v)]
    kv, qkv = torch.stack(rows[1:], dim=1), torch.stack(rows, dim=1)
    lengths: tuple[Any, ...] = cu_seqlens, cu_seqlens, 35, 35
    for got in (
        flash_attn.flash_attn_kvpacked_func(q, kv.unflatten(0, (3, 35)), **options),
        flash_attn.flash_attn_qkvpacked_func(qkv.unflatten(0, (3, 35)), **options),
        flash_attn.flash_attn_varlen_kvpacked_func(rows[0], kv, *lengths, **options),
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 35, **options),
    ):
        assert got[2] is None
        assert torch.equal(got[0].view(o.shape), o)
        by_entry = got[1] if got[1].dim() == 3 else got[1].unflatten(1, (3, 35)).transpose(0, 1)
        assert torch.equal(by_entry, lse)


def scores(
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of the internal functions after dropout_p."""
    return softmax_scale, causal, *window_size, softcap, alibi_slopes


class Form(NamedTuple):
    """The internal functions for batches, or for packed sequences."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    lengths: tuple[Any, ...] = ()
    """The arguments after q, k and v, and after the gradients."""

    def outputs(self, *qkv: Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
        return self.forward(*qkv, *self.lengths, dropout_p, *scores(**options), False)

    def gradients(
        self, *tensors: Tensor, dropout_p: float = 0.0, rng_state: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The gradients d0, d1, d2 of q, k, v, and softmax_d; `tensors` are dout to softmax_lse.

        Between the elements of all tensors are NaN.
        """
        memory = [x.new_full((*x.shape, 2), math.nan) for x in (*tensors, *tensors[1:4])]
        given = [x[..., 1] for x in memory]
        for x, values in zip(given, tensors, strict=False):
            x.copy_(values)
        *_, dq, dk, dv = given
        arguments = *self.lengths, dropout_p, *scores(**options), True, rng_state
        softmax_d = self.backward(*given, *arguments)
        assert all(x[..., 0].isnan().all() for x in memory)
        return {"d0": dq, "d1": dk, "d2": dv, "softmax_d": softmax_d}


BATCHES = Form(interface._flash_attn_forward, interface._flash_attn_backward)
PACKED = Form(interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward, OFFSETS)
FORMS = {"batches": BATCHES, "packed": PACKED}


def assert_passes_agree(
    form: Form, qkv: tuple[Tensor, ...], expected: Callable[..., Tensor], **options: Any
) -> None:
    """Asserts the tolerance rule for both passes, against float64.

    `expected` computes o, or with lse=True the log-sum-exp.
    """
    out, softmax_lse, none, rng_state = form.outputs(*qkv, **options)
    assert none is None
    assert not rng_state
    dout = torch.randn_like(out)
    results = form.gradients(dout, *qkv, out, softmax_lse, **options)
    torch.testing.assert_close(results.pop("softmax_d"), (dout.float() * out.float()).sum(-1).mT)
    results |= {"o": out, "lse": softmax_lse}
    plain, exact = (
        with_gradients(expected, tensors, do) | {"lse": expected(*tensors, lse=True)}
        for tensors, do in ((qkv, dout), (tuple(x.double() for x in qkv), dout.double()))
    )
    for name, value in results.items():
        assert_within_rule(name, value, exact[name], plain[name])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_batches_against_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    def expected(q: Tensor, k: Tensor, v: Tensor, lse: bool = False) -> Tensor:
        return attend(q, k, v, **options)[lse]

    for M, N in ((35, 67), (67, 35)):
        assert_passes_agree(BATCHES, drawn(dtype, M, N), expected, **options)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_packed_sequences_against_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    def expected(q: Tensor, k: Tensor, v: Tensor, lse: bool = False) -> Tensor:
        return by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, lse=lse, **options)

    assert_passes_agree(PACKED, packed(dtype), expected, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_of_parts_of_the_keys_add_up(
    form: Form, softcap: float, dtype: torch.dtype
) -> None:
    """As ring attention computes them: with o and lse of all keys in each backward pass."""
    q, k, v = drawn(dtype)
    do = torch.randn_like(q)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True, softcap=softcap)[0]

    plain, exact = (
        with_gradients(expected, tensors, do.to(tensors[0].dtype))
        for tensors in ((q, k, v), tuple(x.double() for x in (q, k, v)))
    )
    parts = []  # 32 keys that all queries see, and their own 35
    for keys, causal in ((slice(0, 32), False), (slice(32, 67), True)):
        tensors, own = [q, k[:, keys], v[:, keys]], form
        if form is PACKED:
            tensors, length = [x.flatten(0, 1) for x in tensors], keys.stop - keys.start
            lengths = (starts((35,) * 3), starts((length,) * 3), 35, length)
            own = form._replace(lengths=lengths)
        options: dict[str, Any] = {"causal": causal, "softcap": softcap}
        parts.append((own, tensors, options, own.outputs(*tensors, **options)))
    lse = torch.logaddexp(*(outputs[1] for *_, outputs in parts))
    o = sum(outputs[0].float() * (outputs[1] - lse).exp().mT[..., None] for *_, outputs in parts)
    assert isinstance(o, Tensor)
    o = o.to(dtype)
    gradients = [
        own.gradients(do.view_as(o), *tensors, o, lse, **options)
        for own, tensors, options, _ in parts
    ]
    got = {"o": o, "d0": gradients[0]["d0"].float() + gradients[1]["d0"].float()}
    for name in ("d1", "d2"):
        got[name] = torch.cat([x[name].view(3, -1, 2, 24) for x in gradients], dim=1)
    for name, x in got.items():
        assert_within_rule(name, x.view(exact[name].shape).to(dtype), exact[name], plain[name])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_dropout_is_replayed(form: Form) -> None:
    """The bits are those of the seed rng_state, which is drawn from torch's generator."""
    qkv = packed(torch.float32) if form is PACKED else drawn(torch.float32)
    torch.manual_seed(3)
    out, lse, _, rng_state = form.outputs(*qkv, dropout_p=0.4, causal=True)
    torch.manual_seed(3)
    assert torch.equal(form.outputs(*qkv, dropout_p=0.4, causal=True)[0], out)
    assert not torch.equal(form.outputs(*qkv, dropout_p=0.4, causal=True)[0], out)

    def expected(*qkv: Tensor) -> Tensor:
        options: dict[str, Any] = {
            "mask": tk.Mask.causal(align="bottom_right"), "dropout_p": 0.4, "seed": rng_state
        }  # fmt: skip
        if form is PACKED:
            o: Tensor = attention_varlen(*qkv, *OFFSETS[:2], **options)
        else:
            o = attention(*(x.transpose(1, 2) for x in qkv), **options).transpose(1, 2)
        return o

    do = torch.randn_like(out)
    got = form.gradients(do, *qkv, out, lse, dropout_p=0.4, causal=True, rng_state=rng_state)
    del got["softmax_d"]
    assert_same_function({"o": out} | got, with_gradients(expected, qkv, do))


def test_generator_is_left_alone_without_dropout() -> None:
    before = torch.get_rng_state()
    BATCHES.outputs(*(torch.zeros(1, 3, 2, 8) for _ in range(3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_after_the_last_sequence() -> None:
    """They may hold NaN, and have o = 0, lse = -inf and gradients of 0."""
    q, k, v = packed(torch.float32)
    out, lse, _, _ = PACKED.outputs(q, k, v)
    do = torch.randn_like(q)
    expected = PACKED.gradients(do, q, k, v, out, lse)
    tensors = [torch.cat([x, x.new_full((2, *x.shape[1:]), math.nan)]) for x in (do, q, k, v)]
    longer, longer_lse, _, _ = PACKED.outputs(*tensors[1:])
    assert torch.equal(longer, torch.cat([out, torch.zeros(2, 4, 24)]))
    assert longer_lse[:, -2:].eq(-math.inf).all()
    got = PACKED.gradients(*tensors, longer, longer_lse)
    for name in ("d0", "d1", "d2"):
        assert torch.equal(got[name][:-2], expected[name])
        assert not got[name][-2:].any()


def test_queries_without_a_visible_key() -> None:
    """flash_attn gives them the log-sum-exp +inf, which the backward pass takes too."""
    qkv = drawn(torch.float32, 35, 20)
    out, lse, _, _ = BATCHES.outputs(*qkv, causal=True)
    assert lse[..., :15].eq(-math.inf).all()
    do, as_there = torch.randn_like(out), lse.masked_fill(lse == -math.inf, math.inf)
    got, other = (BATCHES.gradients(do, *qkv, out, x, causal=True) for x in (lse, as_there))
    for name, x in got.items():
        assert torch.equal(x, other[name])


def test_gradients_that_are_not_wanted() -> None:
    qkv = drawn(torch.float32)
    out, lse, _, _ = BATCHES.outputs(*qkv)
    expected = BATCHES.gradients(out, *qkv, out, lse)
    dk = torch.empty_like(qkv[1])
    BATCHES.backward(out, *qkv, out, lse, None, dk, None, 0.0, *scores(), False)
    assert torch.equal(dk, expected["d1"])


@pytest.mark.parametrize("backends", [BACKENDS, (ReferenceBackend(),)], ids=["all", "reference"])
def test_without_derivatives_and_autocast(
    backends: tuple[Backend, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, slopes = drawn(torch.float32), torch.rand(4)
    out, lse, _, _ = BATCHES.outputs(*qkv, alibi_slopes=slopes)
    do = torch.randn_like(out)
    expected = {"o": out} | BATCHES.gradients(do, *qkv, out, lse, alibi_slopes=slopes)
    monkeypatch.setattr(interface, "BACKENDS", backends)
    for x in (*qkv, do, slopes):
        x.requires_grad_()
    with torch.autocast("cpu"):
        out, lse, _, _ = BATCHES.outputs(*qkv, alibi_slopes=slopes)
        got = {"o": out} | BATCHES.gradients(do, *qkv, out, lse, alibi_slopes=slopes)
    assert_same_function(got, expected)
    assert not any(x.requires_grad for x in (lse, *got.values()))


def test_nothing_is_copied() -> None:
    """Slices of qkv are read in place."""
    q, k, v = torch.randn(2, 9, 3, 4, 16).unbind(2)
    ran = operators_run_by(lambda: BATCHES.outputs(q, k, v))
    assert ran[FORWARD] == 1
    assert not {"aten::copy_", "aten::clone", "aten::contiguous"} & ran.keys()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_compiled(form: Form) -> None:
    qkv = packed(torch.float32) if form is PACKED else drawn(torch.float32)

    def both(*qkv: Tensor) -> tuple[Tensor, ...]:
        out, lse, _, _ = form.outputs(*qkv, causal=True)
        into = [torch.empty_like(x) for x in qkv]
        softmax_d = form.backward(
            out, *qkv, out, lse, *into, *form.lengths, 0.0, *scores(causal=True), False
        )
        return out, lse, softmax_d, *into

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for x, expected in zip(compiled(*qkv), both(*qkv), strict=True):
        assert torch.equal(x, expected)


def test_compiled_log_sum_exp() -> None:
    """Compiled code does not warn."""
    q, k, v = drawn(torch.float32)
    compiled: Any = torch.compile(flash_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as record:
        got = compiled(q, k, v, return_attn_probs=True)
    assert not [x for x in record if "return_attn_probs" in str(x.message)]
    expected = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[2] is None


Y = torch.randn(2, 5, 4, 8)
FORWARD_ARGUMENTS: dict[str, Any] = {
    "q": Y, "k": Y, "v": Y, "dropout_p": 0.0, "softmax_scale": None, "causal": False,
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
}  # fmt: skip
BACKWARD_ARGUMENTS: dict[str, Any] = FORWARD_ARGUMENTS | {
    "dout": Y, "out": Y, "softmax_lse": torch.zeros(2, 4, 5), "dq": torch.empty_like(Y),
    "dk": torch.empty_like(Y), "dv": torch.empty_like(Y), "deterministic": False,
}  # fmt: skip
OF_LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": starts((5, 5)), "cu_seqlens_k": starts((5, 5)), "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "_flash_attn_forward": FORWARD_ARGUMENTS | {"return_softmax": False},
    "_flash_attn_backward": BACKWARD_ARGUMENTS,
} | {
    f"_flash_attn_varlen_{name}": OF_LENGTHS
    | {key: x.flatten(0, 1) if isinstance(x, Tensor) else x for key, x in given.items()}
    | more
    for name, given, more in (
        ("forward", FORWARD_ARGUMENTS, {}),
        ("backward", BACKWARD_ARGUMENTS, {"softmax_lse": torch.zeros(4, 10)}),
    )
}
INVALID: tuple[tuple[str, str, Callable[[Any], object], type[Exception], str], ...] = (
    ("", "q", lambda x: x[0], ValueError, r"q must be \(.*heads, headdim\), got shape"),
    ("", "k", lambda x: [0.0], TypeError, "k must be a floating-point tensor, got list"),
    ("", "v", Tensor.half, TypeError, "share a dtype, got v torch.float16"),
    ("", "dropout_p", lambda x: None, TypeError, "dropout_p must be a number, got None"),
    ("", "window_size_left", lambda x: 1.5, TypeError, "window_size_left must be an int, got 1.5"),
    ("", "window_size_right", lambda x: None, TypeError, "window_size_right must be an int"),
    ("", "softcap", lambda x: None, TypeError, "softcap must be a number, got None"),
    ("", "alibi_slopes", lambda x: torch.ones(3), ValueError, r"ALiBi slopes must be \(H_q,\)"),
    ("backward", "dout", lambda x: None, TypeError, "dout must be a tensor, got NoneType"),
    ("backward", "out", Tensor.half, TypeError, "out must be float32, got torch.float16"),
    ("backward", "out", lambda x: x[:1], ValueError, r"out must have the shape \(.*\), got \(1,"),
    ("backward", "softmax_lse", Tensor.double, TypeError, "softmax_lse must be float32"),
    ("backward", "softmax_lse", lambda x: x[:1], ValueError, "softmax_lse must have the shape"),
    ("backward", "dq", lambda x: x.to("meta"), ValueError, "dq is on meta, q is on cpu"),
    ("backward", "dk", Tensor.half, TypeError, "dk must be float32, got torch.float16"),
    ("backward", "dv", lambda x: x[..., :7], ValueError, "dv must have the shape"),
    ("backward", "dropout_p", lambda x: 0.5, ValueError,
     "rng_state must be that of the forward pass with dropout_p = 0.5, got None"),
    ("varlen_forward", "leftpad_k", lambda x: OFFSETS[0], ValueError, "leftpad_k must be None"),
    ("varlen_forward", "seqused_k", lambda x: OFFSETS[0], ValueError, "seqused_k must be None"),
    ("varlen_backward", "max_seqlen_k", lambda x: 4, ValueError, "max_seqlen_k must be at least 5"),
)  # fmt: skip
"""The end of the functions' names, an argument, the wrong value from the valid one, the error."""


@each(("end", "argument", "wrong", "error", "message"), INVALID)
def test_invalid_arguments(
    end: str, argument: str, wrong: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    """Nothing is written."""
    for name in VALID:
        if name.endswith(end):
            function, valid = getattr(interface, name), VALID[name]
            function(**valid)
            written = [x.zero_() for key, x in valid.items() if key in ("dq", "dk", "dv")]
            with pytest.raises(error, match=message):
                function(**valid | {argument: wrong(valid.get(argument))})
            assert not any(x.any() for x in written)


def test_invalid_rng_state() -> None:
    for dtype, shape, error, message in (
        (torch.float32, (), TypeError, "rng_state must be int64, got torch.float32"),
        (torch.int64, (2,), ValueError, r"rng_state must have the shape \(\), got \(2,\)"),
    ):
        changes = {"dropout_p": 0.5, "rng_state": torch.ones(shape, dtype=dtype)}
        with pytest.raises(error, match=message):
            interface._flash_attn_backward(**VALID["_flash_attn_backward"] | changes)
