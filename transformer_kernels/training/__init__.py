"""Training of the reference models: text, schedules, checkpoints, curves, and whole runs."""

from transformer_kernels.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from transformer_kernels.training.config import PRESETS, TrainConfig
from transformer_kernels.training.curves import CurveRow, plot_curves, read_curve
from transformer_kernels.training.data import (
    Corpus,
    corpus_from_bytes,
    draw_batch,
    even_batch,
    load_corpus,
    standard_library_text,
)
from transformer_kernels.training.progress import progress_bar
from transformer_kernels.training.run import (
    GeneratorRun,
    TrainResult,
    load_generator,
    resume_generator,
    train_generator,
)
from transformer_kernels.training.schedule import Schedule
from transformer_kernels.training.trainer import GeneratorTrainer

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Corpus",
    "CurveRow",
    "GeneratorRun",
    "GeneratorTrainer",
    "Schedule",
    "TrainConfig",
    "TrainResult",
    "corpus_from_bytes",
    "draw_batch",
    "even_batch",
    "load_checkpoint",
    "load_corpus",
    "load_generator",
    "plot_curves",
    "progress_bar",
    "read_curve",
    "resume_generator",
    "save_checkpoint",
    "standard_library_text",
    "train_generator",
]
