"""A sentence encoder with kernels of `make hub`: padded texts over texts without padding.

    make test-hub
    PYTHONPATH=build/hub_packages python -m benchmarks.runner.hub

The model is a BERT with the widths of bert-base and random weights, in sentence-transformers. The
texts of a batch have lengths spread evenly from 3 tokens to 512. With "sdpa" and "tk/attention"
they are padded; for "tk/flash-attn" sentence-transformers joins them, in all layers. "encode"
includes the tokenizer. A training step is a forward and a backward pass.

The implementations are interleaved, after their errors are compared: root mean squares of the
difference from "sdpa" in float32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor

from benchmarks.runner.drop_in import Row, line, timed
from building.hub import local_kernels

IMPLEMENTATIONS = {"sdpa": "sdpa", "attention": "tk/attention", "ours": "tk/flash-attn"}
"""`attn_implementation` by the name in a row."""
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 995
ROUNDING = 1e-4
"""Relative error that every implementation may have."""


def write_encoder(folder: Path, **sizes: Any) -> None:
    """Writes a BERT with random weights and its tokenizer, whose words are w0, w1, ..."""
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


def measure(folder: Path, batch: list[str], dtype: torch.dtype, seconds: float) -> Iterator[Row]:
    """Measures the encoder in the folder.

    Raises:
        AssertionError: the error of an implementation is more than 1.5 times that of "sdpa".
    """
    exact = encoder(folder, "sdpa")
    encoders = {name: encoder(folder, one, dtype) for name, one in IMPLEMENTATIONS.items()}
    for what, prepare in (("encode", encode), ("training step", step)):
        work = {name: partial(prepare, one, batch) for name, one in encoders.items()}
        expected = prepare(exact, batch)()
        errors = {name: relative_error(make()(), expected) for name, make in work.items()}
        limit = max(1.5 * errors["sdpa"], ROUNDING)
        for name, error in errors.items():
            assert error <= limit, f"{what}, {dtype}: {name} is {error:.1e} off"
        yield Row(what, timed(work, seconds))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the difference, relative to that of `expected`."""
    return float((got.float() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runner.hub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["LOCAL_KERNELS"] = local_kernels()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    batch = texts(args.batch, 512)
    with TemporaryDirectory() as folder:
        write_encoder(Path(folder), num_hidden_layers=args.layers, **BASE)
        for dtype in (torch.float32, torch.bfloat16):
            for row in measure(Path(folder), batch, dtype, args.seconds):
                print(line(f"encoder, {dtype}", row), flush=True)


if __name__ == "__main__":
    main()
