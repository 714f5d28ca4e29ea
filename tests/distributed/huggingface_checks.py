"""Checks of HuggingFace models under `context_parallel` that run in every process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.checks import expect
from tests.distributed.context_checks import assert_close, assert_equal_to_undivided, own
from tests.integrations.huggingface.families import built
from tests.integrations.huggingface.tiny_models import build, padding, tokens
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.distributed import ContextParallel, SequenceLayout, context_parallel
from transformer_kernels.integrations.huggingface import NAME

T = 24
POSITIONS = torch.arange(T)[None]
PACKED = torch.cat([torch.arange(n) for n in (7, 1, 4, 12)])[None]

ROUNDING = 1e-5
"""Some models normalize, or run, in float32."""

LAYOUTS: tuple[SequenceLayout, ...] = ("zigzag", "contiguous")


def check_models() -> None:
    """Causal models with and without padding, and packed documents; encoders."""
    for name in ("llama", "gpt2", "mistral", "gemma2", "qwen3", "gpt_oss"):
        for kind in ("none", "left"):
            check_model(name, POSITIONS, padding(kind, T))
    for layout in LAYOUTS:
        for kind in ("none", "all", "right", "gaps"):
            check_model("llama", POSITIONS, padding(kind, T), layout=layout)
        for name in ("llama", "gpt2", "mistral"):
            check_model(name, PACKED, None, layout=layout)
    if dist.get_world_size() == 2:
        check_model("llama", POSITIONS, padding("left", T), method="all_to_all")
    # A window that is longer than a shard.
    check_model("mistral", POSITIONS, None, sliding_window=T // dist.get_world_size() + 3)
    check_model("bert", POSITIONS, padding("gaps", T))


def check_model(
    name: str,
    positions: Tensor,
    visible: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> None:
    changes: dict[str, Any] = {} if sliding_window is None else {"sliding_window": sliding_window}
    # torch has no matrix products of experts in float64.
    model = build(name, **changes).to(torch.float32 if name == "gpt_oss" else torch.float64)
    text = tokens(T, batch=3)

    def logits(context: ContextParallel | None) -> Tensor:
        inputs = {"input_ids": own(context, text), "position_ids": own(context, positions)}
        if visible is None:
            without: Tensor = model(**inputs).logits
            return without
        here = own(context, visible)
        # The outputs at padding are not defined.
        padded: Tensor = model(**inputs, attention_mask=here).logits * here[..., None]
        return padded

    try:
        assert_equal_to_undivided(model, logits, bound=ROUNDING, **options)
    except Exception as error:
        error.add_note(f"{name}, positions {positions.tolist()}, visible {visible}, {options}")
        raise


def check_training() -> None:
    """Gradient checkpointing, and the loss with `shift_labels`."""
    model = build("llama").double()
    text = tokens(T, batch=3)
    labels = torch.cat([text[:, 1:], torch.full((3, 1), -100)], dim=1)
    expected = model(text, labels=text).loss
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with context_parallel() as context:
        inputs = {"input_ids": text, "position_ids": POSITIONS, "shift_labels": labels}
        shards = {name: context.shard(x, 1) for name, x in inputs.items()}
        loss = model(**shards, labels=shards["input_ids"], num_items_in_batch=3 * (T - 1)).loss
        loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    assert_same_function(total, expected)
    for (name, p), gradient in zip(model.named_parameters(), wanted, strict=True):
        dist.all_reduce(p.grad)
        assert_close(name, p.grad, gradient, 1e-6)


def check_refusals(layout: SequenceLayout) -> None:
    """Positions that begin anew in each shard, caches, chunks and dense masks are refused."""
    llama, chunked, text = build("llama"), build("llama4"), tokens(T, batch=3)
    with context_parallel(layout=layout) as context, torch.no_grad():
        part, positions = context.shard(text, 1), context.shard(POSITIONS, 1)
        dense = torch.ones(3, 1, part.shape[1], part.shape[1], dtype=torch.bool)
        cache = llama(part, position_ids=positions, use_cache=True).past_key_values
        for message, model, options in (
            ("every shard has the positions from 0 on", llama, {}),
            ("must broadcast", llama, {"position_ids": positions, "attention_mask": dense}),
            ("chunks and blocks are not supported", chunked, {"position_ids": positions}),
            ("cannot be cached", llama, {"position_ids": positions, "past_key_values": cache}),
        ):
            expect(ValueError, message, partial(model, part, **options))


def check_other_mixers() -> None:
    """Layers that join tokens within a shard are refused, and calls without positions. On one rank
    they run."""
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "context"))[
        "context"
    ]
    for name in ("qwen3_next", "minimax", "falcon_h1", "lfm2_moe"):
        convolution = name == "falcon_h1"
        mixer = (
            "the layer layers.0.mamba.conv1d" if convolution else "a layer with a recurrent state"
        )
        model = built(name, NAME)
        with context_parallel() as context, torch.no_grad():
            part, positions = context.shard(tokens(T), 1), context.shard(POSITIONS, 1)
            call = partial(model, part, position_ids=positions)
            expect(ValueError, f"{mixer} joins tokens", call)
        with context_parallel(alone), torch.no_grad():
            logits = model(tokens(T), position_ids=POSITIONS).logits
        assert_same_function(logits, model(tokens(T)).logits)
    bert, bart, audio = build("bert"), build("bart"), built("qwen2_audio", NAME)
    with context_parallel() as context, torch.no_grad():
        part, positions = context.shard(tokens(T), 1), context.shard(POSITIONS, 1)
        bert(part, None, None, positions)
        audio(part, position_ids=positions)  # its tower has convolutions, and is not called
        expect(ValueError, r"BertModel needs position_ids .* got None", partial(bert, part))
        of_bart = partial(bart, part, decoder_input_ids=part)
        expect(ValueError, r"BartEncoder needs position_ids .* not take", of_bart)


def check_everything() -> None:
    check_models()
    check_training()
    check_other_mixers()
    for layout in LAYOUTS:
        check_refusals(layout)
