"""The command `train`: trains a reference model."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformer_kernels.cli.error_mapping import as_user_error
from transformer_kernels.cli.errors import UserError
from transformer_kernels.cli.recipes import TRAININGS, Training

if TYPE_CHECKING:
    from transformer_kernels.training import TrainConfig, TrainingRun, TrainResult
    from transformer_kernels.training.distributed import DistributedContext

_INTERRUPTED = 130

_RUN_SETTINGS = (
    (
        "attn-implementation",
        str,
        "how attention is computed: bmm and softmax, our kernels, or torch's SDPA",
    ),
    ("steps", int, "batches to train on"),
    ("batch", int, "examples in a batch, of all processes together"),
    ("accumulate", int, "parts that a batch is cut into, to save memory"),
    ("precision", str, "what products are computed in; weights stay in float32"),
    ("eval-every", int, "steps between validations and checkpoints"),
    ("seed", int, "decides weights, batches and dropout"),
    ("device", str, "torch device; under torchrun, each process takes its own GPU of `cuda`"),
)
_CHOICES = {
    "attn-implementation": ("eager", "fused", "sdpa"),
    "precision": ("float32", "bfloat16", "float16"),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("train", help="train a reference model")
    models = parser.add_subparsers(metavar="model", required=True)
    for training in TRAININGS:
        one = models.add_parser(
            training.kind,
            help=training.help,
            description=(
                f"Trains {training.help}. A preset gives every setting; the options change some. "
                "Ctrl-C saves a checkpoint and stops. Several processes: torchrun --nproc-per-node "
                f"N -m transformer_kernels train {training.kind} ..."
            ),
        )
        _add_files(one, training)
        _add_settings(one, training)
        one.set_defaults(run=run_training, training=training)


def _add_files(parser: argparse.ArgumentParser, training: Training) -> None:
    parser.add_argument("--data", type=Path, metavar="PATH", help=training.data)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder for checkpoint, curve and picture (default: {training.out})",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="CHECKPOINT",
        help="go on with an interrupted run, in its folder and with its settings",
    )


def _add_settings(parser: argparse.ArgumentParser, training: Training) -> None:
    parser.add_argument(
        "--preset",
        choices=training.presets,
        help=f"settings to start from (default: {training.presets[0]})",
    )
    for name, kind, meaning in (*training.model_settings, *training.task_settings, *_RUN_SETTINGS):
        choices = _CHOICES.get(name)
        metavar = None if choices else "NAME" if kind is str else "N"
        parser.add_argument(f"--{name}", type=kind, choices=choices, metavar=metavar, help=meaning)
    parser.add_argument("--lr", type=float, metavar="N", help="highest learning rate")
    parser.add_argument(
        "--recompute",
        action="store_const",
        const=True,
        help="keep only what goes into each block, and compute the rest again",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--deterministic", action="store_true", help="only algorithms that repeat bit for bit"
    )


def run_training(args: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.optional_deps import require
    from transformer_kernels.training.distributed import joined

    with as_user_error(ImportError):
        require("rich", extra="train")
        require("matplotlib", extra="train")
    if args.threads is not None:
        if args.threads < 1:
            raise UserError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    with joined() as ranks:
        with as_user_error(OSError, ValueError, ImportError):
            run = _resumed_run(args, ranks) if args.resume is not None else _new_run(args, ranks)
        with (
            _stop_on_interrupt() as should_stop,
            _progress(run) as on_row,
            as_user_error(OSError, FloatingPointError),
        ):
            result = run.train(on_row=on_row, should_stop=should_stop)
        return _report(run, result, args.training.uses) if ranks.is_first else 0


def _new_run(args: argparse.Namespace, ranks: DistributedContext) -> TrainingRun:
    from transformer_kernels.training import TrainingRun

    config = configured(args)
    data = config.task.data(args.data)
    out = args.out or Path(args.training.out)
    return TrainingRun.start(config, data, out=out, ranks=ranks)


def _resumed_run(args: argparse.Namespace, ranks: DistributedContext) -> TrainingRun:
    from transformer_kernels.training import TrainingRun

    for name in ("preset", "lr", "out", "recompute", *_names(args.training)):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} cannot be given with --resume: the checkpoint fixes it")
    return TrainingRun.resume(args.resume, source=args.data, kind=args.training.kind, ranks=ranks)


def configured(args: argparse.Namespace) -> TrainConfig:
    """The preset with the options put in; ValueError where one is out of range."""
    from dataclasses import replace

    from transformer_kernels.training import PRESETS

    training: Training = args.training
    preset = PRESETS[training.kind][args.preset or training.presets[0]]
    model = replace(preset.task.model, **_given(args, _python(training.model_settings)))
    task = replace(preset.task, model=model, **_given(args, _python(training.task_settings)))
    schedule = preset.schedule
    if args.lr is not None:
        schedule = replace(schedule, peak=args.lr)
    if args.steps is not None:
        schedule = replace(schedule, warmup=min(schedule.warmup, max(args.steps, 1) // 10 or 1))
    run = _given(args, (*_python(_RUN_SETTINGS), "recompute"))
    return replace(preset, task=task, schedule=schedule, **run)


def _names(training: Training) -> tuple[str, ...]:
    return _python((*training.model_settings, *training.task_settings, *_RUN_SETTINGS))


def _python(settings: tuple[tuple[str, type, str], ...]) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name, *_ in settings)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


@contextmanager
def _progress(run: TrainingRun) -> Iterator[Any]:
    """Of the first process."""
    from transformer_kernels.training import progress_bar

    if not run.trainer.ranks.is_first:
        yield None
        return
    config = run.config
    with progress_bar(
        config.steps,
        label=config.attn_implementation,
        unit=config.task.unit,
        score=config.task.score_name,
    ) as on_row:
        yield on_row


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """While it is open, the first Ctrl-C asks to stop; a second one interrupts as usual."""
    interrupted = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def _report(run: TrainingRun, result: TrainResult, uses: tuple[str, ...]) -> int:
    from transformer_kernels.training import plot_curves
    from transformer_kernels.training.session import CHECKPOINT, CURVE, PICTURE

    assert run.folder is not None
    task = result.config.task
    checkpoint = run.folder / CHECKPOINT
    with as_user_error(OSError):
        picture = run.folder / PICTURE
        plot_curves(
            {result.config.attn_implementation: result.rows}, picture, score=task.score_name
        )
    command = "python -m transformer_kernels"
    if not result.finished:
        print(f"stopped after step {result.rows[-1].step} of {result.config.steps}; go on with")
        print(f"  {command} train {task.kind} --resume {checkpoint}")
        return _INTERRUPTED
    print(
        f"{result.config.steps} steps in {result.seconds:.0f} s, "
        f"{result.tokens_per_s:,.0f} {task.unit}/s; held-out data: "
        f"{result.score:.3f} {task.score_name}"
    )
    for name in (CHECKPOINT, CURVE, PICTURE):
        print(f"  {run.folder / name}")
    for use in uses:
        print(f"  {command} {use} --checkpoint {checkpoint}")
    return 0
