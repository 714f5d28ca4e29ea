"""Training of the reference models: data, tasks, schedules, checkpoints, curves and runs."""

from transformer_kernels.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from transformer_kernels.training.config import Precision, TrainConfig
from transformer_kernels.training.curves import CurveRow, plot_curves, read_curve
from transformer_kernels.training.data import (
    Batch,
    ByteLanes,
    ByteWindows,
    Corpus,
    Dataset,
    LaneDataset,
    Tokens,
    corpus_from_bytes,
    draw_batch,
    even_batch,
    load_corpus,
    standard_library_text,
)
from transformer_kernels.training.evaluation import Evaluation, evaluate, evaluate_examples
from transformer_kernels.training.progress import progress_bar
from transformer_kernels.training.schedule import Schedule
from transformer_kernels.training.task import RecurrentTask, State, Task
from transformer_kernels.training.tasks import PRESETS, TASKS
from transformer_kernels.training.tasks.generator import GeneratorTask
from transformer_kernels.training.trainer import Trainer
from transformer_kernels.training.training_run import (
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
    "draw_batch",
    "evaluate",
    "evaluate_examples",
    "even_batch",
    "load_checkpoint",
    "load_corpus",
    "load_generator",
    "load_model",
    "plot_curves",
    "progress_bar",
    "read_curve",
    "resume",
    "save_checkpoint",
    "standard_library_text",
    "train",
]
