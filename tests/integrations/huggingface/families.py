"""The text families of transformers: each agrees with "eager", or is refused.

`python -m tests.integrations.huggingface.families --write` runs all of them, and records the
outcomes in docs/drop-in.md. test_models.py compares with that record.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import re
import textwrap
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.integrations.huggingface.tiny_configs import small_config
from tests.integrations.huggingface.tiny_models import (
    LENGTH,
    Run,
    error_of,
    errors_of_gradients,
    gradients_of,
    padding,
    tokens,
    with_large_weights,
)
from transformer_kernels.functional.attention import attention
from transformer_kernels.integrations.huggingface import NAME, register

PADDINGS = ("none", "right", "left", "gaps")
PAGE = Path(__file__).parents[3] / "docs" / "drop-in.md"
BEGIN, STOP = "<!-- families: begin -->\n", "<!-- families: end -->\n"
NOT_GENERATING = ("BltForCausalLM", "DiffusionGemmaForBlockDiffusion", "xLSTMForCausalLM")
"""Their `generate` raises errors with "eager"."""
MIXED = "padding has an effect on the tokens in eager"
KERNEL = "transformer_kernels.integrations.huggingface.attention.attention"
"""The function that `attention_forward` calls."""


@dataclass(frozen=True)
class Outcome:
    """`detail` is a message: of the refusal, of why it is not built, or of what differs."""

    kind: Literal["agrees", "mixed", "refused", "without attention", "not built", "differs"]
    detail: str = ""

    @property
    def label(self) -> str:
        """The kind, and in brief why a family is not built."""
        reason = self.detail.partition(":")[0]
        return f"{self.kind}: {reason}" if self.kind == "not built" else self.kind


@cache
def _mappings() -> list[tuple[Any, set[str]]]:
    """Returns the library's mappings to model classes, and the families that each has.

    Those of encoder-decoders come before those of their decoders, and language models before base
    models, of which only those count whose family classifies texts, or whose name says "text".
    """
    from transformers.models.auto import modeling_auto as auto

    def names(task: str) -> set[str]:
        return set(getattr(auto, f"MODEL_{task}MAPPING_NAMES"))

    tasks = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    classify = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
    base = set().union(*(names(f"FOR_{task}_") for task in classify))
    base |= {name for name in names("") if name.endswith(("_text", "_text_model"))}
    return [
        *((getattr(auto, f"MODEL_FOR_{task}_MAPPING"), names(f"FOR_{task}_")) for task in tasks),
        (auto.MODEL_MAPPING, base & names("")),
    ]


@cache
def families() -> list[str]:
    """Returns the model_type of each text family."""
    return sorted(set().union(*(names for _, names in _mappings())))


def model_class(family: str) -> Any:
    """Returns the first class of the family that takes its configuration, not a part of it."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]
    classes = [mapping[config] for mapping, names in _mappings() if family in names]
    classes = [one[0] if isinstance(one, tuple) else one for one in classes]
    return next((one for one in classes if one.config_class is config), classes[0])


def tiny_config(family: str) -> Any:
    """Returns a small configuration of the family."""
    from transformers import CONFIG_MAPPING

    config, wanted = small_config(CONFIG_MAPPING[family]), model_class(family).config_class
    if isinstance(config, wanted):
        return config
    text = config.get_text_config(decoder=True)
    return text if isinstance(text, wanted) else config


def built(family: str, attn_implementation: str, weights: Any = None) -> Any:
    """Builds the model in evaluation mode, with these weights or with large random ones."""
    register()
    torch.manual_seed(0)
    model = model_class(family)._from_config(
        tiny_config(family), attn_implementation=attn_implementation, dtype=torch.float32
    )
    if weights is None:
        return with_large_weights(model)
    model.load_state_dict(weights)
    return model.eval()


def _text(length: int, visible: Tensor | None, other: bool) -> Tensor:
    """Returns tokens, with other ones as padding if `other` is set."""
    text = tokens(length)
    return text.where(visible.bool(), text.flip(1)) if other and visible is not None else text


def _arguments(model: Any, kind: str, other: bool) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the arguments of the model, and the mask of the outputs to compare."""
    takes = inspect.signature(model.forward).parameters
    visible = padding(kind)
    text = _text(LENGTH, visible, other)
    given: dict[str, Any] = {"input_ids": text, "attention_mask": visible, "use_cache": False}
    given["bbox"] = torch.zeros(*text.shape, 4, dtype=torch.long)
    if "decoder_input_ids" in takes:
        visible = padding("none" if kind == "none" else "right", 11)
        given |= {"decoder_input_ids": tokens(11), "decoder_attention_mask": visible}
        if not model.config.is_encoder_decoder:  # diffusion: after the text
            before, visible = given["attention_mask"], None
            whole = None if before is None else functional.pad(before, (0, 11), value=1)
            given["decoder_attention_mask"] = whole
    needed = {name for name, one in takes.items() if one.default is one.empty and one.kind < 2}
    if missing := sorted(needed - given.keys() - {"args"}):
        raise NotImplementedError(f"needs {' and '.join(missing)}")
    return {name: value for name, value in given.items() if name in takes}, visible


def run(model: nn.Module, kind: str, other: bool = False) -> Run:
    arguments, visible = _arguments(model, kind, other)
    model.zero_grad()
    torch.manual_seed(0)
    found = model(**arguments)
    tensors = [x for x in found.values() if isinstance(x, Tensor) and x.dim() > 1]
    output = found["logits"] if "logits" in found else tensors[0]
    if visible is not None and output.shape[:2] == visible.shape:
        output = output[visible.bool()]
    return output.detach(), gradients_of(model, output)


def _generated(model: Any, other: bool = False) -> Tensor:
    """Returns six greedy tokens after a padded prompt."""
    start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    visible = padding("left", 9)
    found: Tensor = model.generate(
        _text(9, visible, other), attention_mask=visible, max_new_tokens=6, min_new_tokens=6,
        do_sample=False, num_beams=1, pad_token_id=0, **start,
    )  # fmt: skip
    return found[:, -6:]


def _errors(actual: Run, expected: Run) -> tuple[float, float]:
    """Returns the error of the outputs, and the largest of the gradients."""
    gradients = errors_of_gradients(actual[1], expected[1])
    return error_of(actual[0], expected[0]), max(gradients.values())


def _moved(model: nn.Module) -> nn.Module:
    """Returns a copy with each parameter at one of the two neighbouring numbers."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in moved.parameters():
            signs = torch.randint(2, x.shape, generator=generator) - 0.5
            x.copy_(torch.nextafter(x, signs * torch.inf))
    return moved


def _differences(eager: Any, expected: Mapping[str, Run], ours: Any) -> Iterator[str]:
    """Yields errors above the tolerances of tiny_models.py, and other generated tokens.

    A tolerance is larger where rounding alone has a larger effect: ten times what "eager" itself
    changes by if each parameter moves to a neighbouring number. Where the padding has an effect on
    the tokens in "eager", no result is right: MIXED.
    """
    for kind in PADDINGS:
        errors = _errors(run(ours, kind), expected[kind])
        if errors[0] <= 1e-5 and errors[1] <= 1e-4:
            continue
        noise = _errors(run(_moved(eager), kind), expected[kind])
        allowed = max(1e-5, 10 * noise[0]), max(1e-4, 10 * noise[1])
        if all(error <= most for error, most in zip(errors, allowed, strict=True)):
            continue
        other = run(eager, kind, other=True)[0]
        if error_of(other, expected[kind][0]) > 1e-4:
            yield MIXED
        else:
            yield f"{errors} off with padding {kind!r}, allowed {allowed}"
    if not eager.can_generate() or type(eager).__name__ in NOT_GENERATING:
        return
    tokens_of_eager = _generated(eager)
    if not torch.equal(_generated(ours), tokens_of_eager):
        if not torch.equal(_generated(eager, other=True), tokens_of_eager):
            yield MIXED
        elif torch.equal(_generated(_moved(eager)), tokens_of_eager):
            yield "other tokens are generated"


def compare(family: str) -> Outcome:
    """Returns how the family fares with our attention."""
    try:
        eager = built(family, "eager")
        expected = {kind: run(eager, kind) for kind in PADDINGS}
    except Exception as error:  # noqa: BLE001 - its class is recorded
        return Outcome("not built", _described(error))
    try:
        ours = built(family, NAME, eager.state_dict())
        with mock.patch(KERNEL, wraps=attention) as kernel:
            found = [*_differences(eager, expected, ours)]
    except Exception as error:  # noqa: BLE001 - judged here
        return Outcome("refused" if _is_refusal(error, eager) else "differs", _described(error))
    if wrong := [one for one in found if one != MIXED]:
        return Outcome("differs", "; ".join(wrong))
    if kernel.called:
        return Outcome("mixed" if found else "agrees")
    names = {type(one).__name__ for one in eager.modules()} - {"RwkvSelfAttention"}  # recurrent
    if any(re.search("Attention|Attn", name) for name in names):
        return Outcome("differs", "our attention is not called")
    return Outcome("without attention")


def _is_refusal(error: Exception, model: nn.Module) -> bool:
    """Returns whether our package raised a ValueError that names the model, or one inside it."""
    from transformers import PreTrainedModel

    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    names = {type(one).__name__ for one in model.modules() if isinstance(one, PreTrainedModel)}
    return (
        isinstance(error, ValueError)
        and frame.f_globals["__name__"].startswith("transformer_kernels.")
        and any(re.search(rf"\b{name}\b", str(error)) for name in names)
    )


def _described(error: Exception) -> str:
    if isinstance(error, NotImplementedError) and str(error).startswith("needs "):
        return str(error)
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


TITLES = {
    "agrees": 'Agree with "eager"',
    "mixed": 'Agree, unless padding has an effect on the tokens, which it has in "eager" too',
    "refused": "Refused",
    "without attention": "Have no attention",
    "not built": "Not built by the test",
}


def recorded() -> dict[str, str]:
    """Returns the label of each family in docs/drop-in.md."""
    block = PAGE.read_text().split(BEGIN)[1].split(STOP)[0]
    kinds = {title: kind for kind, title in TITLES.items()}
    found: dict[str, str] = {}
    for paragraph in block.strip().split("\n\n"):
        match = re.fullmatch(r"\*\*(.+)\*\* \(\d+\): (.*)\.", " ".join(paragraph.split()))
        assert match, paragraph
        kind = kinds[match[1]]
        for part in match[2].split("; "):
            reason, _, names = part.rpartition(": ")
            label = f"{kind}: {reason}" if reason else kind
            found |= dict.fromkeys(names.split(", "), label)
    return found


def write(labels: Mapping[str, str]) -> None:
    """Replaces the block in docs/drop-in.md. Families that differ are left out."""
    paragraphs = []
    for kind, title in TITLES.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for family, label in sorted(labels.items()):
            if label.partition(": ")[0] == kind:
                by_reason[label.partition(": ")[2]].append(family)
        parts = [
            f"{reason}: " * bool(reason) + ", ".join(by_reason[reason])
            for reason in sorted(by_reason)
        ]
        if parts:
            number = sum(map(len, by_reason.values()))
            text = f"**{title}** ({number}): {'; '.join(parts)}."
            paragraphs.append(textwrap.fill(text, 110, break_on_hyphens=False) + "\n")
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(STOP)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(paragraphs) + "\n" + STOP + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these families")
    parser.add_argument("--write", action="store_true", help="record the outcomes")
    given = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    labels = recorded() if given.only else {}
    for family in given.only or families():
        start = time.perf_counter()
        outcome = compare(family)
        seconds = time.perf_counter() - start
        print(f"{seconds:5.1f} s  {outcome.kind:17}  {family}  {outcome.detail}", flush=True)
        labels[family] = outcome.label
    if given.write:
        write(labels)


if __name__ == "__main__":
    main()
