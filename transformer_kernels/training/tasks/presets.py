"""Named settings of training runs."""

from __future__ import annotations

from dataclasses import replace

from ...models import (
    bert,
    classifier,
    gated_deltanet,
    generator,
    gpt2,
    linear_transformer,
    lookup,
    reformer,
    sparse_transformer,
    transformer_xl,
    translator,
)
from ...models.bert import BertConfig
from ...models.gpt2 import GPT2Config
from ...models.transformer_xl import TransformerXLConfig
from ..config import Schedule, TrainConfig
from .language import (
    BertTask,
    GatedDeltaNetTask,
    GeneratorTask,
    GPT2Task,
    LinearTransformerTask,
    ReformerTask,
    SparseTransformerTask,
    TransformerXLTask,
)
from .supervised import (
    ClassifierTask,
    GatedDeltaNetRecallTask,
    LinearCopyTask,
    LinearRecallTask,
    LookupTask,
    ReformerCopyTask,
    TranslatorTask,
)

_DEMO = TrainConfig(
    task=SparseTransformerTask(model=sparse_transformer.SIZES["demo"]),
    steps=1000, batch=1, schedule=Schedule(peak=2e-3), eval_every=125, eval_batches=4,
)  # fmt: skip
"""Of models with a long context"""

_COPY = TrainConfig(
    task=ReformerCopyTask(model=reformer.SIZES["copy"]), steps=400, batch=32,
    schedule=Schedule(peak=2e-3, warmup=50, final_share=1.0), eval_every=50, eval_batches=8,
)  # fmt: skip

_RECALL = replace(
    _COPY, task=GatedDeltaNetRecallTask(model=gated_deltanet.SIZES["recall"]), steps=2500,
    schedule=Schedule(peak=4e-3, warmup=50, final_share=0.05), eval_every=100,
)  # fmt: skip

# fmt: off
PRESETS: dict[str, dict[str, TrainConfig]] = {
    "generator": {
        # nanoGPT's laptop setting: config/train_shakespeare_char with its CPU overrides.
        "nanogpt-cpu": TrainConfig(task=GeneratorTask(model=generator.SIZES["nanogpt-cpu"])),
        "demo": TrainConfig(
            task=GeneratorTask(model=generator.SIZES["demo"]), steps=300, batch=4,
            schedule=Schedule(peak=2e-3, warmup=30), eval_every=50, eval_batches=8,
        ),
        # Batch size and steps of the model's source.
        "seed": TrainConfig(
            task=GeneratorTask(model=generator.SIZES["seed"]), steps=170_000, batch=32,
            schedule=Schedule(peak=1e-4, warmup=5000), betas=(0.9, 0.999), weight_decay=0.0,
            eval_every=1000,
        ),
    },
    "gpt2": {
        "demo": TrainConfig(
            task=GPT2Task(model=GPT2Config(
                vocabulary=2048, context=128, layers=4, heads=4, width=128, dropout=0.0
            )),
            steps=1000, batch=8,
        ),
        # nanoGPT's reproduction of GPT-2 (config/train_gpt2): half a million tokens per step.
        **{
            name: TrainConfig(
                task=GPT2Task(model=size), steps=600_000, batch=480, accumulate=40,
                schedule=Schedule(peak=6e-4, warmup=2000), betas=(0.9, 0.95), eval_every=1000,
            )
            for name, size in gpt2.SIZES.items()
        },
    },
    "transformer-xl": {
        "demo": TrainConfig(
            task=TransformerXLTask(model=TransformerXLConfig(
                layers=3, heads=4, width=96, context=64, memory=64, dropout=0.0
            )),
            schedule=Schedule(peak=2e-3),
        ),
        # Batch size, steps, learning rate and clipping of the authors' scripts
        # (kimiyoung/transformer-xl, pytorch/run_enwik8_*.sh).
        **{
            name: TrainConfig(
                task=TransformerXLTask(model=transformer_xl.SIZES[name]), steps=400_000,
                batch=batch, schedule=Schedule(peak=2.5e-4, warmup=warmup, final_share=0.0),
                betas=(0.9, 0.999), weight_decay=0.0, clip=0.25, eval_every=4000,
            )
            for name, batch, warmup in (("enwik8-base", 22, 0), ("enwik8-large", 64, 4000))
        },
    },
    "sparse": {
        "demo": _DEMO,
        # The paper's learning rate, warm-up, weight decay, clipping and 80 epochs of 90 MB. The
        # batch size is ours, as the paper gives none.
        "enwik8": TrainConfig(
            task=SparseTransformerTask(model=sparse_transformer.SIZES["enwik8"]), steps=73_200,
            batch=8, schedule=Schedule(peak=3.5e-4, warmup=5000, final_share=0.0),
            betas=(0.9, 0.999), weight_decay=0.01, eval_every=500,
        ),
    },
    "reformer": {
        "demo": replace(_DEMO, task=ReformerTask(model=reformer.SIZES["demo"]), batch=2),
        # The paper's batch size and steps. Its optimizer, Adafactor, is AdamW here, with a learning
        # rate of ours.
        "enwik8": TrainConfig(
            task=ReformerTask(model=reformer.SIZES["enwik8"]), steps=20_000, batch=8,
            schedule=Schedule(peak=1e-3, warmup=2000), eval_every=500,
        ),
    },
    "reformer-copy": {"demo": _COPY},
    "linear": {
        name: replace(
            _DEMO, task=LinearTransformerTask(model=size), batch=4096 // size.context
        )
        for name, size in linear_transformer.SIZES.items() if name not in ("copy", "recall")
    },
    "linear-copy": {
        "demo": replace(_COPY, task=LinearCopyTask(model=linear_transformer.SIZES["copy"])),
    },
    "linear-recall": {
        "demo": replace(_RECALL, task=LinearRecallTask(model=linear_transformer.SIZES["recall"])),
    },
    "gated-deltanet": {
        "demo": replace(
            _DEMO, task=GatedDeltaNetTask(model=gated_deltanet.SIZES["demo"]), batch=4
        ),
    },
    "gated-deltanet-recall": {"demo": _RECALL},
    "classifier": {
        "demo": TrainConfig(
            task=ClassifierTask(model=classifier.SIZES["demo"]), steps=1500, batch=16,
            schedule=Schedule(peak=1e-3, warmup=150),
        ),
        # Batch size and learning rate of the experiment linked in the model's source.
        "seed": TrainConfig(
            task=ClassifierTask(model=classifier.SIZES["seed"]), steps=25_000, batch=4,
            schedule=Schedule(peak=1e-4, warmup=2500, final_share=1.0), betas=(0.9, 0.999),
            weight_decay=0.0, eval_every=2500, eval_batches=250,
        ),
    },
    "translator": {
        "demo": TrainConfig(
            task=TranslatorTask(model=translator.SIZES["demo"]), steps=1600, batch=32,
            schedule=Schedule(peak=1e-3, warmup=200), betas=(0.9, 0.98), weight_decay=0.0,
            eval_every=400, eval_batches=8,
        ),
        # The base model of Attention Is All You Need, section 5: about 25,000 tokens per step on
        # each side.
        "base": TrainConfig(
            task=TranslatorTask(model=translator.SIZES["base"]), steps=100_000, batch=512,
            accumulate=8, schedule=Schedule(
                decay="inverse_sqrt", peak=(512 * 4000) ** -0.5, warmup=4000, final_share=0.0
            ),
            betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, eval_every=1000,
        ),
    },
    "bert": {
        "demo": TrainConfig(
            task=BertTask(model=BertConfig(
                vocabulary=2048, context=128, layers=4, heads=4, width=128, hidden=512
            )),
            steps=600, batch=16, schedule=Schedule(peak=1e-3, warmup=60), betas=(0.9, 0.98),
        ),
        # Batch size, steps and peak rate of BERT's pre-training, but with cosine decay instead of
        # linear decay.
        **{
            name: TrainConfig(
                task=BertTask(model=size), steps=1_000_000, batch=256, accumulate=16,
                schedule=Schedule(peak=1e-4, warmup=10_000, final_share=0.0),
                betas=(0.9, 0.999), weight_decay=0.01, eval_every=1000,
            )
            for name, size in bert.SIZES.items()
        },
    },
    "lookup": {
        "demo": TrainConfig(
            task=LookupTask(model=lookup.SIZES["demo"]), steps=600, batch=64,
            schedule=Schedule(peak=3e-2, warmup=20), weight_decay=0.0, eval_every=100,
            eval_batches=10,
        ),
    },
}
# fmt: on
"""Presets by kind of task and by name; the first of each kind is its default."""
