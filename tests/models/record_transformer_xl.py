"""Records transformer_xl.safetensors: HuggingFace's Transformer-XL with random weights.

The test environment has a later version of transformers, without this model. To record again:

    python -m venv build/transfo_xl
    build/transfo_xl/bin/pip install torch==2.13.0 safetensors transformers==4.36.2 "numpy<2"
    build/transfo_xl/bin/python -m tests.models.record_transformer_xl

The model runs in float64 with exact frequencies, so that the comparison is strict. It also runs
unchanged, in float32, which must give the same log-probabilities.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("transformer_xl.safetensors")
VERSION = "4.36.2"
SEGMENTS, BATCH, LENGTH, VOCABULARY = 20, 2, 5, 7


@dataclass(frozen=True)
class Case:
    """Options of the recorded model, under the names of `TransformerXLConfig`."""

    name: str
    memory: int
    clamp: int | None = None
    same_length: bool = False
    norm: str = "post"
    tied_biases: bool = False


CASES = (
    Case("no memory", memory=0),
    Case("shorter than a segment", memory=3, tied_biases=True),
    Case("pre-norm", memory=7, clamp=4, norm="pre"),
    Case("same length", memory=12, clamp=6, same_length=True),
)
LAYERS, WIDTH, HEADS, HEAD_SIZE, HIDDEN = 2, 8, 2, 3, 12


def record(case: Case) -> dict[str, Tensor]:
    """Weights, tokens, targets, log-probabilities and gradients, under names of `case`."""
    model = _model(case).double()
    generator = torch.Generator().manual_seed(CASES.index(case))
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 * drawn)
    shape = (SEGMENTS, BATCH, LENGTH)
    tokens, targets = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    unchanged = _model(case)
    unchanged.load_state_dict(model.state_dict())
    in_float32 = _log_probabilities(unchanged, tokens, targets, nullcontext())

    frequencies = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    model.transformer.pos_emb.inv_freq = frequencies
    # The model masks its scores in float32, where float64's smallest number overflows.
    masks = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    results = _log_probabilities(model, tokens, targets, masks)
    torch.testing.assert_close(in_float32.double(), results, rtol=0, atol=1e-4)

    tensors = {"tokens": tokens, "targets": targets, "log_probabilities": results}
    tensors |= {f"weights.{name}": weight for name, weight in weights.items()}
    tensors |= {f"gradients.{name}": weight.grad for name, weight in model.named_parameters()}
    return {f"{case.name}/{name}": tensor.contiguous() for name, tensor in tensors.items()}


def _model(case: Case) -> Any:
    library = importlib.import_module("transformers")
    assert library.__version__ == VERSION, f"transformers {VERSION} is needed"
    config = library.TransfoXLConfig(
        vocab_size=VOCABULARY, cutoffs=[], div_val=1, n_layer=LAYERS, n_head=HEADS,
        d_model=WIDTH, d_embed=WIDTH, d_head=HEAD_SIZE, d_inner=HIDDEN, mem_len=case.memory,
        clamp_len=case.clamp or -1, same_length=case.same_length, pre_lnorm=case.norm == "pre",
        untie_r=not case.tied_biases, dropout=0.0, dropatt=0.0,
    )  # fmt: skip
    return library.TransfoXLLMHeadModel(config)


def _log_probabilities(
    model: nn.Module, tokens: Tensor, targets: Tensor, options: AbstractContextManager[Any]
) -> Tensor:
    """(segments, B, M, vocabulary); gradients of the mean losses are added up over segments."""
    memories, results = None, []
    with options:
        for segment, target in zip(tokens, targets, strict=True):
            output = model(segment, mems=memories)
            memories = output.mems
            results.append(output.prediction_scores)
            nn.functional.nll_loss(results[-1].flatten(0, 1), target.flatten()).backward()
    return torch.stack(results).detach()


def main() -> None:
    """Writes the file."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    save_file = importlib.import_module("safetensors.torch").save_file
    tensors: dict[str, Tensor] = {}
    for case in CASES:
        tensors |= record(case)
    save_file(tensors, FILE, {"source": f"transformers {VERSION}, torch {torch.__version__}"})


if __name__ == "__main__":
    main()
