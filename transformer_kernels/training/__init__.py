"""Training of the reference models: data, tasks, schedules, checkpoints, curves and runs."""

from .checkpoint import Checkpoint, CheckpointError
from .config import Precision, Schedule, TrainConfig
from .curves import CurveRow, plot_curves, progress_bar, read_curve
from .data import (
    Batch,
    ByteLanes,
    ByteWindows,
    Corpus,
    Dataset,
    LaneDataset,
    Tokens,
    corpus_from_bytes,
    load_corpus,
    standard_library_text,
)
from .task import RecurrentTask, State, Task
from .tasks import PRESETS, TASKS, GeneratorTask
from .trainer import Evaluation, Trainer, evaluate, evaluate_examples
from .training_run import (
    LoadedModel,
    TrainingRun,
    TrainResult,
    load_generator,
    load_model,
    resume,
    train,
)

__all__ = [
    "PRESETS",
    "TASKS",
    "Batch",
    "ByteLanes",
    "ByteWindows",
    "Checkpoint",
    "CheckpointError",
    "Corpus",
    "CurveRow",
    "Dataset",
    "Evaluation",
    "GeneratorTask",
    "LaneDataset",
    "LoadedModel",
    "Precision",
    "RecurrentTask",
    "Schedule",
    "State",
    "Task",
    "Tokens",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingRun",
    "corpus_from_bytes",
    "evaluate",
    "evaluate_examples",
    "load_corpus",
    "load_generator",
    "load_model",
    "plot_curves",
    "progress_bar",
    "read_curve",
    "resume",
    "standard_library_text",
    "train",
]
