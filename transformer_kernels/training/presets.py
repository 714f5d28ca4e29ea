"""Named settings of training runs."""

from __future__ import annotations

from transformer_kernels.models import (
    BertConfig,
    GPT2Config,
    bert,
    classifier,
    generator,
    gpt2,
    lookup,
    translator,
)
from transformer_kernels.training.config import TrainConfig
from transformer_kernels.training.schedule import Schedule
from transformer_kernels.training.tasks import (
    BertTask,
    ClassifierTask,
    GeneratorTask,
    GPT2Task,
    LookupTask,
    TranslatorTask,
)

GENERATOR = {
    "nanogpt-cpu": TrainConfig(
        task=GeneratorTask(model=generator.SIZES["nanogpt-cpu"]),
        schedule=Schedule(peak=1e-3, warmup=100),
    ),
    "demo": TrainConfig(
        task=GeneratorTask(model=generator.SIZES["demo"]),
        steps=300,
        batch=4,
        schedule=Schedule(peak=2e-3, warmup=30),
        eval_every=50,
        eval_batches=8,
    ),
    "seed": TrainConfig(
        task=GeneratorTask(model=generator.SIZES["seed"]),
        steps=170_000,
        batch=32,
        schedule=Schedule(peak=1e-4, warmup=5000),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eval_every=1000,
    ),
}
"""Presets of the byte-level generator; the names are those of the model's sizes.

nanogpt-cpu is nanoGPT's laptop setting (config/train_shakespeare_char with its CPU overrides). seed
has the batch size and steps of the model's source.
"""

GPT2 = {
    "demo": TrainConfig(
        task=GPT2Task(
            model=GPT2Config(
                vocabulary=2048, context=128, layers=4, heads=4, width=128, dropout=0.0
            )
        ),
        steps=1000,
        batch=8,
        schedule=Schedule(peak=1e-3, warmup=100),
    ),
    **{
        name: TrainConfig(
            task=GPT2Task(model=gpt2.SIZES[name]),
            steps=600_000,
            batch=480,
            accumulate=40,
            schedule=Schedule(peak=6e-4, warmup=2000),
            betas=(0.9, 0.95),
            eval_every=1000,
        )
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
}
"""Presets of GPT-2. The published sizes use the batch size, steps and learning rate of nanoGPT's
reproduction of GPT-2 (config/train_gpt2): half a million tokens per step."""

CLASSIFIER = {
    "demo": TrainConfig(
        task=ClassifierTask(model=classifier.SIZES["demo"]),
        steps=1500,
        batch=16,
        schedule=Schedule(peak=1e-3, warmup=150),
        eval_every=250,
    ),
    "seed": TrainConfig(
        task=ClassifierTask(model=classifier.SIZES["seed"]),
        steps=25_000,
        batch=4,
        schedule=Schedule(peak=1e-4, warmup=2500, final_share=1.0),
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eval_every=2500,
        eval_batches=250,
    ),
}
"""Presets of the classifier. seed has the batch size and learning rate of the experiment linked in
the model's source."""

TRANSLATOR = {
    "demo": TrainConfig(
        task=TranslatorTask(model=translator.SIZES["demo"]),
        steps=1600,
        batch=32,
        schedule=Schedule(peak=1e-3, warmup=200),
        betas=(0.9, 0.98),
        weight_decay=0.0,
        eval_every=400,
        eval_batches=8,
    ),
    "base": TrainConfig(
        task=TranslatorTask(model=translator.SIZES["base"]),
        steps=100_000,
        batch=512,
        accumulate=8,
        schedule=Schedule(
            decay="inverse_sqrt", peak=(512 * 4000) ** -0.5, warmup=4000, final_share=0.0
        ),
        betas=(0.9, 0.98),
        eps=1e-9,
        weight_decay=0.0,
        eval_every=1000,
    ),
}
"""Presets of the translator. base is the base model of Attention Is All You Need, section 5: about
25,000 tokens per step on each side."""

BERT = {
    "demo": TrainConfig(
        task=BertTask(
            model=BertConfig(vocabulary=2048, context=128, layers=4, heads=4, width=128, hidden=512)
        ),
        steps=600,
        batch=16,
        schedule=Schedule(peak=1e-3, warmup=60),
        betas=(0.9, 0.98),
    ),
    **{
        name: TrainConfig(
            task=BertTask(model=bert.SIZES[name]),
            steps=1_000_000,
            batch=256,
            accumulate=16,
            schedule=Schedule(peak=1e-4, warmup=10_000, final_share=0.0),
            betas=(0.9, 0.999),
            weight_decay=0.01,
            eval_every=1000,
        )
        for name in ("bert-base", "bert-large")
    },
}
"""Presets of BERT. The published sizes use the batch size, steps and peak rate of BERT's
pre-training, but with cosine decay instead of linear decay."""

LOOKUP = {
    "demo": TrainConfig(
        task=LookupTask(model=lookup.SIZES["demo"]),
        steps=600,
        batch=64,
        schedule=Schedule(peak=3e-2, warmup=20),
        weight_decay=0.0,
        eval_every=100,
        eval_batches=10,
    ),
}

PRESETS: dict[str, dict[str, TrainConfig]] = {
    "generator": GENERATOR,
    "gpt2": GPT2,
    "classifier": CLASSIFIER,
    "translator": TRANSLATOR,
    "bert": BERT,
    "lookup": LOOKUP,
}
"""Presets by kind of task and by name; the first of each kind is its default."""
