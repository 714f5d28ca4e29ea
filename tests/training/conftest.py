"""Fixtures: config and data of a run small enough for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.runtime import one_thread
from transformer_kernels.models import GeneratorConfig
from transformer_kernels.training import (
    ByteWindows,
    Corpus,
    GeneratorTask,
    Schedule,
    TrainConfig,
    corpus_from_bytes,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For fixtures of a module too: the bits of a result may depend on the number of threads."""
    with one_thread():
        yield


@pytest.fixture
def config() -> TrainConfig:
    return TrainConfig(
        task=GeneratorTask(model=GeneratorConfig(layers=2, width=16, heads=2, context=12)),
        steps=8,
        batch=4,
        schedule=Schedule(peak=1e-2, warmup=2),
        eval_every=4,
        eval_batches=3,
    )


@pytest.fixture
def corpus() -> Corpus:
    return corpus_from_bytes(b"the quick brown fox jumps over the lazy dog. " * 40, "a fox")


@pytest.fixture
def data(corpus: Corpus) -> ByteWindows:
    return ByteWindows(corpus, 12)
