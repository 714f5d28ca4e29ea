"""A sentence encoder with kernels of `make hub`: padded texts, and texts without padding.

    make test-hub
    PYTHONPATH=build/hub_packages python -m benchmarks sentence_encoder --seconds 60

The model is a BERT with the widths of bert-base and random weights, in sentence-transformers. The
texts of a batch have lengths spread evenly from 3 tokens to 512. With "sdpa" and "tk/attention"
they are padded; for "tk/flash-attn" sentence-transformers joins them, in all layers. `encode`
includes the tokenizer. `error` is the root mean square of the difference from "sdpa" in float32,
relative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner.checks import Sizes
from benchmarks.runner.run import Comparison, Measurement, Run
from building.hub import local_kernels
from transformer_kernels.bench import Direction
from transformer_kernels.bench.contenders import Contender

IMPLEMENTATIONS = ("sdpa", "tk/attention", "tk/flash-attn")
"""`attn_implementation`, and the variant in rows."""
BASE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 995
ROUNDING = 1e-4
"""Relative error that every implementation may have."""


def comparisons() -> Iterator[Comparison]:
    for dtype in (torch.float32, torch.bfloat16):
        case = Sizes(name="encoder", B=8, H_q=12, H_kv=12, M=512, N=512, dtype=dtype)
        yield Comparison(name=case.dtype_name, measurements=partial(encoders, case, BASE))


def encoders(case: Sizes, sizes: dict[str, int], run: Run) -> Iterator[Measurement]:
    """Measures `encode`, and a training step: a forward and a backward pass.

    Raises:
        AssertionError: the error of an implementation is more than 1.5 times that of "sdpa".
    """
    import sentence_transformers  # noqa: F401  # a suite without it says so first

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["LOCAL_KERNELS"] = local_kernels()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_encoder(folder, **sizes)
        exact = encoder(folder, "sdpa")
        every = {name: encoder(folder, name, case.dtype) for name in IMPLEMENTATIONS}
    batch = texts(case.B, case.N)
    kinds: list[tuple[Direction, Callable[[Any, list[str]], Callable[[], Tensor]]]]
    kinds = [("fwd", encode), ("fwd+bwd", step)]
    for direction, prepare in kinds:
        expected = prepare(exact, batch)()
        errors: dict[str, float] = {}
        contenders = []
        for variant, one in every.items():
            got = prepare(one, batch)()
            errors[variant] = float((got.float() - expected).norm() / expected.norm())
            limit = max(1.5 * errors["sdpa"], ROUNDING)
            assert errors[variant] <= limit, (
                f"{direction}, {case.dtype_name}: {variant} is {errors[variant]:.1e} off"
            )
            work = partial(prepare, one, batch)
            contenders.append(Contender(case, direction, variant, work, errors[variant]))
        yield run.timed(contenders)


def write_encoder(folder: Path, **sizes: Any) -> None:
    """Writes a BERT with random weights and its tokenizer, whose words are w0, w1, ..."""
    import transformers

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = [*SPECIAL, *(f"w{n}" for n in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def texts(batch: int, longest: int) -> list[str]:
    """Texts of 3 to `longest` tokens; [CLS] and [SEP] are two of them."""
    lengths = torch.linspace(3, longest, batch).round().int().tolist()
    return [" ".join(f"w{(7 * n + m) % WORDS}" for m in range(n - 2)) for n in lengths]


def encoder(folder: Path, attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the encoder. Its embeddings are means over tokens."""
    from sentence_transformers import SentenceTransformer

    options = {"attn_implementation": attn_implementation, "dtype": dtype}
    return SentenceTransformer(str(folder), device="cpu", model_kwargs=options)


def encode(one: Any, batch: list[str]) -> Callable[[], Tensor]:
    """Returns a call that computes the embeddings of the texts."""

    def run() -> Tensor:
        found: Tensor = one.encode(batch, batch_size=len(batch), convert_to_tensor=True)
        return found

    return run


def step(one: Any, batch: list[str]) -> Callable[[], Tensor]:
    """Returns a call that runs a training step; the result is the gradient of the vocabulary."""
    features, vocabulary = one.preprocess(batch), next(one.parameters())

    def run() -> Tensor:
        one.zero_grad()
        one(dict(features))["sentence_embedding"].square().mean().backward()
        gradient: Tensor = vocabulary.grad
        return gradient

    return run
